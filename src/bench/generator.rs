//! One thread's connections and requests, on a ring of the data plane. Owned by one pinned thread, like a core.
//!
//! It does the least that a request needs: one send, a look at the answer's bytes where they lie, two or three values into histograms.
//! Times are those of the turn in which the kernel reported what happened, so a busy generator makes times longer, never shorter.
//! In a closed loop a request is due when the answer before it has come; in an open loop at its time.
//!
//! Invariant **B1**: a place is used anew only when the kernel holds no operation on its descriptor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::check::{Check, Want, Wrong};
use super::machine::{Process, thread_times_ns};
use super::schedule::Arrivals;
use super::tally::{LATE_NS, Tally};
use super::target::Target;
use super::work::{Kind, Shape, Ticket, Work};
use crate::ring::{Event, Received, Ring, RingLimits, Token, eventfd, reset_on_close, shutdown};

/// Connections that are being made at once: more would only wait in the other side's line.
const CONNECTING_MAX: usize = 128;
/// How often requests without an end are looked for.
const SWEEP_NS: u64 = 100_000_000;

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// So many at a time.
    Closed(usize),
    /// So many a second; drawn gaps instead of even ones.
    Open {
        /// Requests a second.
        rate_per_s: f64,
        /// Exponential gaps.
        is_poisson: bool,
    },
    /// At the times of a trace.
    Trace,
}

/// What a thread does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where to; a slice says which.
    pub targets: Vec<Target>,
    /// What they have in common.
    pub shape: Arc<Shape>,
    /// What prompts are like.
    pub kind: Kind,
    /// When.
    pub pace: Pace,
    /// Connections at most, to one target, of all threads.
    pub connections_max: usize,
    /// A request without an end after so long is wrong, ns.
    pub timeout_ns: u64,
    /// Processes of the targets, by target.
    pub processes: Vec<Process>,
    /// This thread's number, and how many there are.
    pub part: (usize, usize),
}

impl Plan {
    /// This thread's part of what is counted for all.
    fn share(&self, all: usize) -> usize {
        let (at, of) = self.part;
        all / of + usize::from(at < all % of)
    }
}

/// How long a slice is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Its window, ns.
    Time(u64),
    /// Requests of all threads.
    Requests(u64),
}

/// Some time with one target.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// Which one.
    pub target: usize,
    /// What begins before is not counted, ns.
    pub warm_up_ns: u64,
    /// Of the window, which begins then.
    pub length: Length,
    /// How long after the window answers are waited for, ns.
    pub drain_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    Connecting,
    Idle,
    Busy,
    /// Shut down; waits for the kernel.
    Closing,
    /// The same, to be opened anew for the request it has.
    Reopening,
}

/// A request under way.
struct Flight {
    due_ns: u64,
    /// Its answer has begun.
    first_ns: Option<u64>,
    event_ns: Option<u64>,
    was_resent: bool,
    want: Want,
    ticket: Ticket,
}

struct Connection {
    target: usize,
    generation: u32,
    fd: Option<OwnedFd>,
    phase: Phase,
    connect_op: Option<u32>,
    is_receiving: bool,
    is_sending: bool,
    /// An answer has come on it: it may be closed by now.
    is_used: bool,
    request: Vec<u8>,
    check: Check,
    flight: Option<Flight>,
}

impl Connection {
    fn new(target: usize) -> Connection {
        let want = Want {
            is_stream: false,
            events: None,
            tokens: 0,
        };
        Connection {
            target,
            generation: 0,
            fd: None,
            phase: Phase::Free,
            connect_op: None,
            is_receiving: false,
            is_sending: false,
            is_used: false,
            request: Vec::new(),
            check: Check::new(want),
            flight: None,
        }
    }

    fn is_quiet(&self) -> bool {
        !self.is_receiving && !self.is_sending && self.connect_op.is_none()
    }
}

/// What is kept of one target from slice to slice.
struct Lane {
    address: std::net::SocketAddr,
    work: Work,
    /// Free places that had a connection to it, and its idle connections, newest last.
    free: Vec<u32>,
    idle: Vec<u32>,
    /// Connections to it that are not free.
    open: usize,
}

/// The slice that is running.
struct Running {
    slice: Slice,
    tally: Tally,
    arrivals: Option<Arrivals>,
    /// All ns since the generator began.
    from_ns: u64,
    window_ns: u64,
    end_ns: u64,
    /// Requests of this thread that are still to be sent, where they are counted.
    left: Option<u64>,
    in_flight: usize,
    /// What is due waits for a connection, since it last caught up.
    is_blocked: bool,
    started: Option<Sample>,
    is_over: bool,
}

/// CPU times at one moment, ns.
#[derive(Clone, Copy)]
struct Sample {
    at_ns: u64,
    busy_ns: u64,
    taken_ns: u64,
    cpu_ns: Option<u64>,
}

/// The generator of one thread.
pub struct Generator {
    ring: Ring,
    plan: Plan,
    started: Instant,
    connections: Vec<Connection>,
    lanes: Vec<Lane>,
    connecting: usize,
    swept_ns: u64,
    starved: Vec<Token>,
    // After the ring, whose operations name it.
    _wake: OwnedFd,
}

impl Generator {
    /// Sets up a ring on the calling thread, which must be the one that runs it.
    ///
    /// # Errors
    /// io_uring is missing or forbidden: `corelane doctor` says what to do.
    pub fn new(plan: Plan) -> io::Result<Generator> {
        let wake = eventfd()?;
        let limits = RingLimits {
            buffer_count: 1024,
            buffer_bytes: 16 * 1024,
            multishot_receive: crate::ring::probe().is_ok_and(|a| a.multishot_receive),
            defer_taskrun: true,
        };
        let ring = Ring::new(limits, &wake)?;
        let lane = |target: &Target| Lane {
            address: target.address,
            work: Work::new(plan.shape.clone(), &plan.kind, target, plan.part),
            free: Vec::new(),
            idle: Vec::new(),
            open: 0,
        };
        Ok(Generator {
            ring,
            lanes: plan.targets.iter().map(lane).collect(),
            plan,
            started: Instant::now(),
            connections: Vec::new(),
            connecting: 0,
            swept_ns: 0,
            starved: Vec::new(),
            _wake: wake,
        })
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Runs a slice to the end of its last answer.
    ///
    /// # Errors
    /// The ring is broken, or descriptors ran out.
    pub fn run(&mut self, slice: Slice) -> io::Result<Tally> {
        let from_ns = self.now_ns();
        let window_ns = from_ns + slice.warm_up_ns;
        let (of, plan) = (self.plan.part.1 as f64, &self.plan);
        let mut run = Running {
            slice,
            tally: Tally::default(),
            arrivals: match plan.pace {
                Pace::Open {
                    rate_per_s,
                    is_poisson,
                } => {
                    let seed = plan.shape.seed.wrapping_add(from_ns) ^ plan.part.0 as u64;
                    let phase = plan.part.0 as f64 / of;
                    Some(Arrivals::new(
                        rate_per_s / of,
                        is_poisson.then_some(seed),
                        phase,
                    ))
                }
                _ => None,
            },
            from_ns,
            window_ns,
            end_ns: match slice.length {
                Length::Time(ns) => window_ns + ns,
                Length::Requests(_) => u64::MAX,
            },
            left: match slice.length {
                Length::Time(_) => None,
                Length::Requests(count) => Some(plan.share(count as usize) as u64),
            },
            in_flight: 0,
            is_blocked: false,
            started: None,
            is_over: false,
        };
        self.lanes[slice.target].work.restart();
        loop {
            let now = self.now_ns();
            self.keep_time(&mut run, now);
            let next = self.issue(&mut run, now)?;
            if next == Next::Never && run.in_flight == 0 && now >= run.window_ns {
                // Without a time the window ends with the last answer.
                self.end_window(&mut run, now);
                if now >= run.end_ns || run.left == Some(0) || self.plan.pace == Pace::Trace {
                    break;
                }
            }
            if run.is_over && now > run.end_ns.saturating_add(slice.drain_ns) {
                self.cut(&mut run);
                break;
            }
            let sleep = self.sleep_ns(&run, next, now);
            self.ring
                .turn(Duration::from_nanos(sleep), Duration::ZERO)?;
            let now = self.now_ns();
            self.keep_time(&mut run, now);
            while let Some(event) = self.ring.next_event() {
                self.handle(&mut run, event, now)?;
            }
            for token in std::mem::take(&mut self.starved) {
                self.arm(token);
            }
            if now >= self.swept_ns + SWEEP_NS {
                self.swept_ns = now;
                self.sweep(&mut run, now);
            }
        }
        Ok(run.tally)
    }

    // ---- time ----

    fn keep_time(&self, run: &mut Running, now: u64) {
        if run.started.is_none() && now >= run.window_ns {
            run.started = Some(self.sample(run, now));
        }
        if now >= run.end_ns {
            self.end_window(run, now);
        }
    }

    fn end_window(&self, run: &mut Running, now: u64) {
        if std::mem::replace(&mut run.is_over, true) {
            return;
        }
        let end = self.sample(run, now);
        let start = run.started.unwrap_or(end);
        let tally = &mut run.tally;
        tally.window_ns = end.at_ns - start.at_ns;
        tally.busy_ns = end.busy_ns - start.busy_ns;
        tally.taken_ns = end.taken_ns - start.taken_ns;
        // `None` where threads of the process have ended meanwhile: their time is gone.
        tally.cpu_ns = end
            .cpu_ns
            .zip(start.cpu_ns)
            .and_then(|(end, start)| end.checked_sub(start));
        if self.plan.part.0 == 0 {
            let process = self.plan.processes.get(run.slice.target);
            tally.rss_bytes = process.and_then(Process::rss_bytes);
        }
        run.end_ns = run.end_ns.min(now);
    }

    fn sample(&self, run: &Running, now: u64) -> Sample {
        let (busy_ns, taken_ns) = thread_times_ns();
        // One thread asks, so that it is counted once.
        let process = self
            .plan
            .processes
            .get(run.slice.target)
            .filter(|_| self.plan.part.0 == 0);
        Sample {
            at_ns: now,
            busy_ns,
            taken_ns,
            cpu_ns: process.and_then(Process::cpu_ns),
        }
    }

    fn sleep_ns(&self, run: &Running, next: Next, now: u64) -> u64 {
        let mut until = self.swept_ns + SWEEP_NS;
        if let Next::At(due) = next {
            until = until.min(due);
        }
        if run.started.is_none() {
            until = until.min(run.window_ns);
        }
        if !run.is_over {
            until = until.min(run.end_ns);
        }
        until.saturating_sub(now)
    }

    // ---- sending ----

    /// Sends what is due, as far as there are connections.
    fn issue(&mut self, run: &mut Running, now: u64) -> io::Result<Next> {
        let target = run.slice.target;
        let (concurrency, is_closed) = match self.plan.pace {
            Pace::Closed(count) => (self.plan.share(count), true),
            _ => (self.plan.share(self.plan.connections_max), false),
        };
        loop {
            if run.left == Some(0) {
                return Ok(Next::Never);
            }
            let due = match (&run.arrivals, is_closed) {
                (Some(arrivals), _) => run.from_ns + arrivals.due_ns(),
                (None, true) => now,
                (None, false) => match self.lanes[target].work.due_ns() {
                    Some(ns) => run.from_ns + ns,
                    None => return Ok(Next::Never),
                },
            };
            // What is due in the window is sent, however late it is.
            if due >= run.end_ns {
                return Ok(Next::Never);
            }
            if due > now {
                run.is_blocked = false;
                return Ok(Next::At(due));
            }
            let lane = &self.lanes[target];
            let can_open = lane.open < concurrency && self.connecting < CONNECTING_MAX;
            if run.in_flight >= concurrency || (lane.idle.is_empty() && !can_open) {
                run.is_blocked = true;
                return Ok(Next::AfterOthers);
            }
            if let Some(arrivals) = &mut run.arrivals {
                arrivals.sent();
            }
            self.send_next(run, due, now)?;
        }
    }

    fn send_next(&mut self, run: &mut Running, due_ns: u64, now: u64) -> io::Result<()> {
        let target = run.slice.target;
        let is_counted = due_ns >= run.window_ns;
        if let Some(left) = run.left.as_mut().filter(|_| is_counted) {
            *left -= 1;
        }
        run.in_flight += 1;
        run.tally.asked += u64::from(is_counted);
        if is_counted && now > due_ns + LATE_NS {
            match run.is_blocked {
                true => run.tally.waited += 1,
                false => run.tally.late += 1,
            }
        }
        let lane = &mut self.lanes[target];
        let (index, is_open) = match lane.idle.pop() {
            Some(index) => (index, true),
            None => {
                lane.open += 1;
                let index = lane.free.pop().unwrap_or_else(|| {
                    self.connections.push(Connection::new(target));
                    self.connections.len() as u32 - 1
                });
                (index, false)
            }
        };
        run.tally.connections_max = run.tally.connections_max.max(lane.open as u64);
        let connection = &mut self.connections[index as usize];
        let (ticket, want) = lane.work.write(&mut connection.request);
        connection.check.reset(want);
        connection.flight = Some(Flight {
            due_ns,
            first_ns: None,
            event_ns: None,
            was_resent: false,
            want,
            ticket,
        });
        match is_open {
            true => self.send(index),
            false => self.connect(index)?,
        }
        Ok(())
    }

    fn connect(&mut self, index: u32) -> io::Result<()> {
        let connection = &mut self.connections[index as usize];
        connection.generation = connection.generation.wrapping_add(1) & 0xff_ffff;
        connection.phase = Phase::Connecting;
        connection.is_used = false;
        let token = Token {
            index,
            generation: connection.generation,
        };
        let (fd, op) = self
            .ring
            .connect(token, &self.lanes[connection.target].address)?;
        connection.fd = Some(fd);
        connection.connect_op = Some(op);
        self.connecting += 1;
        Ok(())
    }

    fn send(&mut self, index: u32) {
        let connection = &mut self.connections[index as usize];
        connection.phase = Phase::Busy;
        let token = Token {
            index,
            generation: connection.generation,
        };
        if let Some(fd) = &connection.fd {
            let request = std::mem::take(&mut connection.request);
            connection.is_sending = true;
            self.ring.send(token, fd, request, 0);
        }
    }

    fn arm(&mut self, token: Token) {
        if let Some(connection) = self.find(token)
            && !connection.is_receiving
            && !matches!(
                connection.phase,
                Phase::Closing | Phase::Reopening | Phase::Free
            )
        {
            connection.is_receiving = true;
            let connection = &self.connections[token.index as usize];
            if let Some(fd) = &connection.fd {
                self.ring.receive(token, fd);
            }
        }
    }

    fn find(&mut self, token: Token) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(token.index as usize)?;
        (connection.generation == token.generation).then_some(connection)
    }

    // ---- what happened ----

    fn handle(&mut self, run: &mut Running, event: Event, now: u64) -> io::Result<()> {
        match event {
            Event::Received {
                token,
                received,
                armed,
            } => self.received(run, token, received, armed, now)?,
            Event::Sent {
                token,
                result,
                bytes,
                from,
                ..
            } => {
                let Some(connection) = self.find(token) else {
                    return Ok(());
                };
                connection.is_sending = false;
                match result {
                    Ok(count) if from + count < bytes.len() && connection.phase == Phase::Busy => {
                        connection.is_sending = true;
                        if let Some(fd) = &self.connections[token.index as usize].fd {
                            self.ring.send(token, fd, bytes, from + count);
                        }
                    }
                    // A broken connection is found by its receive.
                    _ => connection.request = bytes,
                }
                self.settle(token.index)?;
            }
            Event::Connected { token, result, .. } => {
                let Some(connection) = self.find(token) else {
                    return Ok(());
                };
                connection.connect_op = None;
                self.connecting -= 1;
                match result {
                    Ok(()) if self.connections[token.index as usize].phase == Phase::Connecting => {
                        self.arm(token);
                        self.connections[token.index as usize].phase = Phase::Busy;
                        self.send(token.index);
                    }
                    Ok(()) => self.settle(token.index)?,
                    Err(errno) => {
                        // One that was given up has been counted then.
                        if self.connections[token.index as usize].phase == Phase::Connecting {
                            self.fail(run, token.index, Wrong::Connect(errno), now);
                        }
                        self.settle(token.index)?;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn received(
        &mut self,
        run: &mut Running,
        token: Token,
        received: Received,
        armed: bool,
        now: u64,
    ) -> io::Result<()> {
        let index = token.index;
        let Some(connection) = self.find(token) else {
            return Ok(());
        };
        if !armed {
            connection.is_receiving = false;
        }
        match received {
            Received::Data(lease) => {
                if connection.phase == Phase::Busy {
                    self.take(run, index, lease.as_ref(), now);
                } else if connection.phase == Phase::Idle {
                    run.tally
                        .add_wrong(&Wrong::Framing("bytes nobody asked for"), lease.as_ref());
                    self.close(index, Phase::Closing);
                }
                drop(lease);
                self.arm(token);
            }
            Received::Starved => self.starved.push(token),
            Received::Stopped => {}
            Received::End | Received::Failed(_) => self.ended(run, index, now),
        }
        self.settle(index)
    }

    /// Bytes of an answer.
    fn take(&mut self, run: &mut Running, index: u32, bytes: &[u8], now: u64) {
        let connection = &mut self.connections[index as usize];
        let Some(flight) = &mut connection.flight else {
            return;
        };
        flight.first_ns.get_or_insert(now);
        let fed = connection.check.feed(bytes);
        if fed.events > 0 {
            let is_in_window = !run.is_over && now >= run.window_ns;
            if is_in_window {
                run.tally.events += u64::from(fed.events);
                if let Some(last) = flight.event_ns.filter(|last| *last >= run.window_ns) {
                    run.tally.gap.saturating_record((now - last).max(1));
                }
                if fed.events > 1 {
                    // They came together.
                    let _ = run.tally.gap.record_n(1, u64::from(fed.events - 1));
                }
            }
            flight.event_ns = Some(now);
        }
        match fed.end {
            None => {}
            Some(Ok(())) => self.finish(run, index, now),
            Some(Err(wrong)) => self.fail(run, index, wrong, now),
        }
    }

    fn ended(&mut self, run: &mut Running, index: u32, now: u64) {
        let connection = &mut self.connections[index as usize];
        match (&mut connection.flight, connection.phase) {
            (Some(flight), Phase::Busy) => {
                let is_untouched = flight.first_ns.is_none();
                if is_untouched && connection.is_used && !flight.was_resent {
                    // Closed while it was idle, as servers do: every client sends such a request once more.
                    flight.was_resent = true;
                    run.tally.resent += 1;
                    self.close(index, Phase::Reopening);
                    return;
                }
                match connection.check.end() {
                    Ok(()) => self.finish(run, index, now),
                    Err(wrong) => self.fail(run, index, wrong, now),
                }
            }
            (None, Phase::Idle) => self.close(index, Phase::Closing),
            _ => {}
        }
    }

    /// A right answer is complete.
    fn finish(&mut self, run: &mut Running, index: u32, now: u64) {
        let connection = &mut self.connections[index as usize];
        let Some(flight) = connection.flight.take() else {
            return;
        };
        let lane = &mut self.lanes[connection.target];
        run.in_flight -= 1;
        if flight.due_ns >= run.window_ns {
            let first_ns = flight.first_ns.unwrap_or(now);
            run.tally
                .first
                .saturating_record((first_ns - flight.due_ns).max(1));
            run.tally
                .total
                .saturating_record((now - flight.due_ns).max(1));
            run.tally.good += 1;
        }
        if !run.is_over && now >= run.window_ns {
            run.tally.answers += 1;
        }
        lane.work.give_back(flight.ticket, true, now - run.from_ns);
        // Whoever answers before it has read the request does not get another one.
        if connection.check.keep_alive() && !connection.is_sending {
            connection.phase = Phase::Idle;
            connection.is_used = true;
            lane.idle.push(index);
        } else {
            self.close(index, Phase::Closing);
        }
    }

    fn fail(&mut self, run: &mut Running, index: u32, wrong: Wrong, now: u64) {
        let connection = &mut self.connections[index as usize];
        run.tally.add_wrong(&wrong, connection.check.text());
        if let Some(flight) = connection.flight.take() {
            run.in_flight -= 1;
            let work = &mut self.lanes[connection.target].work;
            work.give_back(flight.ticket, false, now - run.from_ns);
        }
        self.close(index, Phase::Closing);
    }

    /// Ends a connection; its place is free, or opened anew, when the kernel is done with it.
    fn close(&mut self, index: u32, phase: Phase) {
        let connection = &mut self.connections[index as usize];
        if connection.phase == Phase::Idle {
            let idle = &mut self.lanes[connection.target].idle;
            idle.retain(|other| *other != index);
        }
        connection.phase = phase;
        if let Some(op) = connection.connect_op {
            self.ring.cancel_connect(op);
        } else if let Some(fd) = &connection.fd {
            // No port waits for two minutes: a run may open more connections than there are ports.
            reset_on_close(fd);
            shutdown(fd);
        }
    }

    fn settle(&mut self, index: u32) -> io::Result<()> {
        let connection = &mut self.connections[index as usize];
        if !connection.is_quiet() {
            return Ok(());
        }
        match connection.phase {
            Phase::Closing => {
                connection.fd = None;
                connection.phase = Phase::Free;
                let lane = &mut self.lanes[connection.target];
                lane.open -= 1;
                lane.free.push(index);
                Ok(())
            }
            Phase::Reopening => {
                connection.fd = None;
                if let Some(flight) = &connection.flight {
                    connection.check.reset(flight.want);
                }
                self.connect(index)
            }
            _ => Ok(()),
        }
    }

    fn sweep(&mut self, run: &mut Running, now: u64) {
        let timeout_ns = self.plan.timeout_ns;
        for index in 0..self.connections.len() {
            let flight = self.connections[index].flight.as_ref();
            if flight.is_some_and(|flight| now.saturating_sub(flight.due_ns) > timeout_ns) {
                self.fail(run, index as u32, Wrong::TimedOut, now);
                // A settled one whose kernel work had ended already.
                let _ = self.settle(index as u32);
            }
        }
    }

    /// Time is over: what still runs is cut, and what was due and not sent is counted.
    fn cut(&mut self, run: &mut Running) {
        for index in 0..self.connections.len() {
            if self.connections[index].flight.take().is_some() {
                run.tally.cut += 1;
                run.in_flight -= 1;
                self.close(index as u32, Phase::Closing);
                let _ = self.settle(index as u32);
            }
        }
        if let Some(arrivals) = &mut run.arrivals {
            while run.from_ns + arrivals.due_ns() < run.end_ns {
                arrivals.sent();
                run.tally.unsent += 1;
            }
        }
    }
}

/// When the next request is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    At(u64),
    /// It is due, and waits for a connection.
    AfterOthers,
    /// There is none in this slice.
    Never,
}
