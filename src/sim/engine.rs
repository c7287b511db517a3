//! One simulated worker: a vLLM engine as far as a router can tell.
//!
//! It works in steps. A step has a budget of tokens: each running sequence takes one, the rest goes to prompts, first come
//! first served, in chunks (chunked prefill). It lasts as long as its prompt tokens take at the engine's rate, what each
//! request costs when it begins, and a decode part that grows with the batch and with its context. While nothing but
//! decoding goes on, the steps up to the next end are one event, cut short when something arrives.
//!
//! Simplifications: a request reserves the blocks of its answer when it begins, so nothing is preempted; all sequences of
//! a worker are of one model.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::agenda::{Ns, ns};
use super::kv::Kv;

/// How fast and how large a worker is.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds {
    /// Prompt tokens a second that are not cached.
    pub prefill_tokens_per_s: f64,
    /// Seconds that a request costs when it begins, whatever is cached.
    pub request_s: f64,
    /// Prompt tokens a second, cached or not, that the engine can take in (tokenising, hashing, block tables).
    pub intake_tokens_per_s: f64,
    /// Tokens of one step at most.
    pub step_tokens_max: u32,
    /// Sequences at once at most.
    pub sequence_count_max: usize,
    /// Seconds of a decode step, batch of none.
    pub decode_step_s: f64,
    /// Seconds that each sequence adds to it.
    pub decode_sequence_s: f64,
    /// Seconds that each token of context adds to it.
    pub decode_context_s: f64,
    /// Tokens of KV cache.
    pub kv_tokens: u64,
    /// Tokens of a block: what is shared is shared by whole blocks.
    pub kv_block_tokens: u32,
    /// A prefix that loses a block is lost as a whole, see [`Kv::is_lost_whole`].
    pub is_hybrid: bool,
    /// P/D: tokens a second whose KV a decode worker fetches, for each request.
    pub transfer_tokens_per_s: f64,
    /// P/D: seconds before the first of them.
    pub transfer_s: f64,
}

impl Default for Speeds {
    /// A tensor-parallel pair of current accelerators with a model of 30 billion active parameters, roughly.
    fn default() -> Speeds {
        Speeds {
            prefill_tokens_per_s: 16_000.0,
            request_s: 0.002,
            intake_tokens_per_s: f64::INFINITY,
            step_tokens_max: 8192,
            sequence_count_max: 256,
            decode_step_s: 0.012,
            decode_sequence_s: 0.000_1,
            decode_context_s: 1.5e-8,
            kv_tokens: 1_000_000,
            kv_block_tokens: 64,
            is_hybrid: false,
            transfer_tokens_per_s: 400_000.0,
            transfer_s: 0.005,
        }
    }
}

/// What a worker does for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// The prompt; P/D.
    Prefill,
    /// The answer, after fetching the prompt's KV; P/D.
    Decode,
}

/// A request, as a worker sees it.
#[derive(Clone, Debug)]
pub struct Job {
    /// Whose it is; the engine does not look at it.
    pub id: usize,
    /// What is to be done.
    pub part: Part,
    /// Tokens of the prompt, at least one.
    pub prompt_tokens: u32,
    /// Tokens of the answer, at least one.
    pub output_tokens: u32,
    /// Names of the whole blocks of the prompt, and of the answer unless it is made elsewhere.
    pub blocks: Box<[u64]>,
}

/// What a worker says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// The prompt of a job begins to be computed: so many of its tokens were cached.
    Began {
        /// Whose.
        id: usize,
        /// Tokens found.
        cached_tokens: u32,
    },
    /// The first token of an answer is there.
    First(usize),
    /// A job is done.
    Done(usize),
    /// A job can never fit.
    TooLong(usize),
}

struct Running {
    job: Job,
    private: u64,
    /// Prompt tokens still to compute.
    left: u32,
    /// Nobody wants its answer any more.
    is_aborted: bool,
}

#[derive(Debug)]
enum Phase {
    Idle,
    /// One step with prompts in it.
    Mixed {
        chunks: Vec<(usize, u32)>,
    },
    /// Steps of decoding only.
    Decoding {
        began: Ns,
        step: Ns,
        count: u64,
    },
}

/// How long steps took, for inter-token latencies: (time, sequences times steps).
pub type Steps = Vec<(Ns, u64)>;

/// The state of one worker.
pub struct Engine {
    speeds: Speeds,
    /// The blocks.
    pub kv: Kv,
    /// 1 is as given; 0.1 ten times slower.
    pub pace: f64,
    /// Nothing begins before.
    stalled_until: Ns,
    waiting: VecDeque<Job>,
    /// Decode jobs without room yet.
    to_fetch: VecDeque<Job>,
    slots: Vec<Option<Running>>,
    free: Vec<usize>,
    prefilling: VecDeque<usize>,
    joining: Vec<usize>,
    /// Joined, no token yet.
    fresh: Vec<usize>,
    decoding: BinaryHeap<Reverse<(u64, usize)>>,
    fetching: usize,
    context: u64,
    step: u64,
    phase: Phase,
    /// Which of the ends that were announced counts.
    pub turn: u64,
    /// What it said since it was asked.
    pub said: Vec<Said>,
    /// Steps since it was asked.
    pub steps: Steps,
    /// Prompt tokens computed, since the start.
    pub computed_tokens: u64,
    /// Time in which it worked.
    pub busy: Ns,
    pieces: u64,
}

impl Engine {
    /// An idle worker.
    pub fn new(speeds: Speeds) -> Engine {
        let blocks = speeds.kv_tokens / u64::from(speeds.kv_block_tokens);
        let mut kv = Kv::new(blocks);
        kv.is_lost_whole = speeds.is_hybrid;
        Engine {
            kv,
            speeds,
            pace: 1.0,
            stalled_until: 0,
            waiting: VecDeque::new(),
            to_fetch: VecDeque::new(),
            slots: Vec::new(),
            free: Vec::new(),
            prefilling: VecDeque::new(),
            joining: Vec::new(),
            fresh: Vec::new(),
            decoding: BinaryHeap::new(),
            fetching: 0,
            context: 0,
            step: 0,
            phase: Phase::Idle,
            turn: 0,
            said: Vec::new(),
            steps: Vec::new(),
            computed_tokens: 0,
            busy: 0,
            pieces: 0,
        }
    }

    /// How it was made.
    pub fn speeds(&self) -> &Speeds {
        &self.speeds
    }

    /// Jobs it has: running, waiting, fetching.
    pub fn job_count(&self) -> usize {
        self.waiting.len() + self.to_fetch.len() + self.running()
    }

    /// Jobs that wait to begin.
    pub fn waiting_count(&self) -> usize {
        self.waiting.len() + self.to_fetch.len()
    }

    /// Tokens it has sent until now, since the start.
    pub fn pieces(&self, now: Ns) -> u64 {
        let under_way = match &self.phase {
            Phase::Decoding { began, step, count } => {
                let steps = (now.saturating_sub(*began) / *step).min(*count);
                steps * self.decoding.len() as u64
            }
            Phase::Idle | Phase::Mixed { .. } => 0,
        };
        self.pieces + under_way
    }

    fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a job. True: the announced end may have to be announced anew ([`Engine::poke`]).
    pub fn submit(&mut self, job: Job) {
        match job.part {
            Part::Decode => self.to_fetch.push_back(job),
            Part::Whole | Part::Prefill => self.waiting.push_back(job),
        }
    }

    /// Decode jobs that have got their room: (place, when their KV will be here). To be called after a submit and after
    /// whatever gave room.
    pub fn fetch(&mut self, now: Ns) -> Vec<(usize, Ns)> {
        let mut begun = Vec::new();
        while self.running() < self.speeds.sequence_count_max
            && let Some(job) = self.to_fetch.pop_front()
        {
            let Some((place, cached)) = self.admit(job) else {
                break;
            };
            let Some(running) = &self.slots[place] else {
                continue;
            };
            let missing = f64::from(running.job.prompt_tokens - cached);
            let seconds = self.speeds.transfer_s + missing / self.speeds.transfer_tokens_per_s;
            self.fetching += 1;
            begun.push((place, now + ns(seconds)));
        }
        begun
    }

    /// The KV of a decode job has come.
    pub fn fetched(&mut self, place: usize) {
        self.fetching -= 1;
        self.joining.push(place);
    }

    /// Takes a job back that has not begun. False: it has, or there is none.
    pub fn abort(&mut self, id: usize) -> bool {
        let before = self.waiting_count();
        self.waiting.retain(|job| job.id != id);
        self.to_fetch.retain(|job| job.id != id);
        if self.waiting_count() < before {
            return true;
        }
        let is_it = |slot: &Option<Running>| {
            slot.as_ref()
                .is_some_and(|running| running.job.id == id && !running.is_aborted)
        };
        let place = self.slots.iter().position(is_it);
        let place = place.filter(|place| !self.has_begun(*place));
        if let Some(running) = place.and_then(|place| self.slots[place].as_mut()) {
            // Its blocks are given back when its KV has come and the engine looks at it again.
            running.is_aborted = true;
        }
        place.is_some()
    }

    fn has_begun(&self, place: usize) -> bool {
        let is_decoding = self
            .decoding
            .iter()
            .any(|Reverse((_, other))| *other == place);
        is_decoding || self.prefilling.contains(&place)
    }

    /// Gives a job its blocks. `None`: no room now, and it stays first in line.
    fn admit(&mut self, job: Job) -> Option<(usize, u32)> {
        let block = self.speeds.kv_block_tokens;
        let total = match job.part {
            Part::Prefill => job.prompt_tokens,
            Part::Whole | Part::Decode => job.prompt_tokens + job.output_tokens,
        };
        let whole = job.blocks.len().min((total / block) as usize);
        let private = u64::from(total.div_ceil(block)) - whole as u64;
        if u64::from(total.div_ceil(block)) > self.kv.capacity() {
            self.said.push(Said::TooLong(job.id));
            // A place that is free again at once.
            return Some((self.place(None), 0));
        }
        let Some(held) = self.kv.pin(&job.blocks[..whole], private) else {
            match job.part {
                Part::Decode => self.to_fetch.push_front(job),
                Part::Whole | Part::Prefill => self.waiting.push_front(job),
            }
            return None;
        };
        // The last token is always computed: its logits are wanted.
        let cached = (held as u32 * block).min((job.prompt_tokens - 1) / block * block);
        let id = job.id;
        let left = job.prompt_tokens - cached;
        let is_decode = job.part == Part::Decode;
        let place = self.place(Some(Running {
            job,
            private,
            left,
            is_aborted: false,
        }));
        if !is_decode {
            let cached_tokens = cached;
            self.said.push(Said::Began { id, cached_tokens });
        }
        Some((place, cached))
    }

    fn place(&mut self, running: Option<Running>) -> usize {
        let is_none = running.is_none();
        let place = match self.free.pop() {
            Some(place) => {
                self.slots[place] = running;
                place
            }
            None => {
                self.slots.push(running);
                self.slots.len() - 1
            }
        };
        if is_none {
            self.free.push(place);
        }
        place
    }

    /// Begins what can begin, or cuts a run of steps short so that something new can. The time of its end, if that is new.
    pub fn poke(&mut self, now: Ns) -> Option<Ns> {
        let has_news = !self.waiting.is_empty() || !self.joining.is_empty();
        match &mut self.phase {
            Phase::Idle => self.begin(now),
            Phase::Decoding { began, step, count } if has_news => {
                let over = now.saturating_sub(*began) / *step + 1;
                if over >= *count {
                    return None;
                }
                *count = over;
                let end = *began + over * *step;
                self.turn += 1;
                Some(end)
            }
            Phase::Decoding { .. } | Phase::Mixed { .. } => None,
        }
    }

    /// The step, or run of steps, that was announced is over; the next one begins.
    pub fn end(&mut self, now: Ns) -> Option<Ns> {
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Idle => {}
            Phase::Mixed { chunks } => {
                self.move_on(1);
                for (place, tokens) in chunks {
                    self.end_chunk(place, tokens);
                }
            }
            Phase::Decoding { step, count, .. } => {
                let sequences = self.decoding.len() as u64;
                self.steps.push((step, count * sequences));
                self.busy += step * count;
                self.move_on(count);
            }
        }
        self.begin(now)
    }

    fn move_on(&mut self, steps: u64) {
        self.step += steps;
        self.pieces += steps * self.decoding.len() as u64;
        self.context += steps * self.decoding.len() as u64;
        for place in std::mem::take(&mut self.fresh) {
            if let Some(running) = &self.slots[place] {
                self.said.push(Said::First(running.job.id));
            }
        }
        while let Some(Reverse((end, place))) = self.decoding.peek().copied()
            && end <= self.step
        {
            self.decoding.pop();
            self.finish(place);
        }
    }

    fn end_chunk(&mut self, place: usize, tokens: u32) {
        self.computed_tokens += u64::from(tokens);
        let Some(running) = &mut self.slots[place] else {
            return;
        };
        running.left -= tokens;
        if running.left > 0 {
            return;
        }
        self.prefilling.retain(|other| *other != place);
        self.pieces += 1;
        let (id, part, output) = (running.job.id, running.job.part, running.job.output_tokens);
        self.said.push(Said::First(id));
        if part == Part::Whole && output > 1 {
            self.context += u64::from(running.job.prompt_tokens);
            let end = self.step + u64::from(output) - 1;
            self.decoding.push(Reverse((end, place)));
        } else {
            self.release(place);
        }
    }

    /// A decoding sequence has its last token.
    fn finish(&mut self, place: usize) {
        if let Some(running) = &self.slots[place] {
            let job = &running.job;
            let made = match job.part {
                Part::Decode => job.output_tokens,
                Part::Whole | Part::Prefill => job.output_tokens - 1,
            };
            self.context -= u64::from(job.prompt_tokens + made);
        }
        self.release(place);
    }

    fn release(&mut self, place: usize) {
        if let Some(id) = self.free(place) {
            self.said.push(Said::Done(id));
        }
    }

    /// Gives back a place and its blocks; whose it was.
    fn free(&mut self, place: usize) -> Option<usize> {
        let Running { job, private, .. } = self.slots[place].take()?;
        self.free.push(place);
        let total = match job.part {
            Part::Prefill => job.prompt_tokens,
            Part::Whole | Part::Decode => job.prompt_tokens + job.output_tokens,
        };
        let whole = job
            .blocks
            .len()
            .min((total / self.speeds.kv_block_tokens) as usize);
        self.kv.unpin(&job.blocks[..whole], private);
        Some(job.id)
    }

    fn begin(&mut self, now: Ns) -> Option<Ns> {
        if now < self.stalled_until {
            return None;
        }
        for place in std::mem::take(&mut self.joining) {
            let is_aborted = self.slots[place]
                .as_ref()
                .is_some_and(|running| running.is_aborted);
            if is_aborted {
                self.free(place);
            } else if let Some(running) = &self.slots[place] {
                let end = self.step + u64::from(running.job.output_tokens);
                self.context += u64::from(running.job.prompt_tokens);
                self.decoding.push(Reverse((end, place)));
                self.fresh.push(place);
            }
        }
        let (chunks, mut seconds) = self.chunks();
        self.turn += 1;
        if chunks.is_empty() {
            return self.begin_decoding(now);
        }
        let tokens: u64 = chunks.iter().map(|(_, tokens)| u64::from(*tokens)).sum();
        seconds += tokens as f64 / self.speeds.prefill_tokens_per_s;
        if !self.decoding.is_empty() {
            seconds += self.decode_step(1);
        }
        let step = ns(seconds / self.pace).max(1);
        self.busy += step;
        if !self.decoding.is_empty() {
            self.steps.push((step, self.decoding.len() as u64));
        }
        self.phase = Phase::Mixed { chunks };
        Some(now + step)
    }

    /// What of the prompts goes into the next step, and what it costs to begin those that begin.
    fn chunks(&mut self) -> (Vec<(usize, u32)>, f64) {
        let mut chunks = Vec::new();
        let mut seconds = 0.0;
        let mut budget = self
            .speeds
            .step_tokens_max
            .saturating_sub(self.decoding.len() as u32);
        let mut take = |left: u32| {
            let tokens = left.min(budget);
            budget -= tokens;
            (tokens, budget > 0)
        };
        let mut has_budget = true;
        for place in &self.prefilling {
            let left = self.slots[*place]
                .as_ref()
                .map_or(0, |running| running.left);
            let tokens;
            (tokens, has_budget) = take(left);
            if tokens > 0 {
                chunks.push((*place, tokens));
            }
        }
        while has_budget
            && self.running() < self.speeds.sequence_count_max
            && let Some(job) = self.waiting.pop_front()
        {
            let prompt = f64::from(job.prompt_tokens);
            let Some((place, _)) = self.admit(job) else {
                break;
            };
            let Some(running) = &self.slots[place] else {
                continue;
            };
            seconds += self.speeds.request_s + prompt / self.speeds.intake_tokens_per_s;
            let tokens;
            (tokens, has_budget) = take(running.left);
            self.prefilling.push_back(place);
            if tokens > 0 {
                chunks.push((place, tokens));
            }
        }
        (chunks, seconds)
    }

    /// Seconds of a decode step with this batch, in the middle of `count` steps.
    fn decode_step(&self, count: u64) -> f64 {
        let sequences = self.decoding.len() as f64;
        let context = self.context as f64 + sequences * (count as f64 - 1.0) / 2.0;
        self.speeds.decode_step_s
            + sequences * self.speeds.decode_sequence_s
            + context * self.speeds.decode_context_s
    }

    fn begin_decoding(&mut self, now: Ns) -> Option<Ns> {
        let Reverse((end, _)) = self.decoding.peek()?;
        let count = if self.fresh.is_empty() {
            (end - self.step).max(1)
        } else {
            1
        };
        let step = ns(self.decode_step(count) / self.pace).max(1);
        self.phase = Phase::Decoding {
            began: now,
            step,
            count,
        };
        Some(now + step * count)
    }

    /// From now on nothing begins before `until`; what is under way ends.
    pub fn stall(&mut self, now: Ns, until: Ns) -> Option<Ns> {
        self.stalled_until = until;
        self.cut(now)
    }

    /// From now on it works at another pace (from the next step).
    pub fn set_pace(&mut self, now: Ns, pace: f64) -> Option<Ns> {
        self.pace = pace;
        self.cut(now)
    }

    /// Ends a run of decode steps with the step under way.
    fn cut(&mut self, now: Ns) -> Option<Ns> {
        let Phase::Decoding { began, step, count } = &mut self.phase else {
            return None;
        };
        *count = (*count).min(now.saturating_sub(*began) / *step + 1);
        self.turn += 1;
        Some(*began + *step * *count)
    }

    /// It begins anew: everything it held is gone. Gives the ids of the jobs that were lost.
    pub fn restart(&mut self) -> Vec<usize> {
        let waiting = self.waiting.drain(..).chain(self.to_fetch.drain(..));
        let mut lost: Vec<usize> = waiting.map(|job| job.id).collect();
        let running = self
            .slots
            .iter()
            .flatten()
            .filter(|running| !running.is_aborted);
        lost.extend(running.map(|running| running.job.id));
        let mut new = Engine::new(self.speeds.clone());
        (new.turn, new.pace) = (self.turn + 1, self.pace);
        (new.computed_tokens, new.busy) = (self.computed_tokens, self.busy);
        new.pieces = self.pieces;
        *self = new;
        lost
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
