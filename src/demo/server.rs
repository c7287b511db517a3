//! One simulated vLLM worker: HTTP around a model engine.
//!
//! Runs on the fleet's own tokio threads, never on a core of the router. One task owns the engine and steps it by the
//! clock; handlers send it commands and receive what each step brings. A handler that is dropped (its client has gone)
//! takes its sequences out of the engine by the drop of its [`Ticket`]. Errors are vLLM's, see `api`. In P/D the engine's
//! task also keeps the leases of what the worker has handed over; who may fetch it is decided by the fleet's `handover`
//! book, or, for a worker of another process, by `remote`.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ahash::AHashMap;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use super::api::{self, Answer, ApiError, Dialect, EventWriter, Served};
use super::board::Board;
use super::engine::{Engine, EngineConfig, Event, Nanos, NewSequence};
use super::handover::{Book, Claim, HandoverCounts, Role, Seat, Violation};
use super::remote;

/// vLLM's version that this worker claims in `/version`.
const VERSION: &str = "0.11.0+corelane.mock";
/// Longest request body taken, in bytes.
const BODY_BYTES_MAX: usize = 64 << 20;

/// What a request receives: which choice, and what happened to it.
type Delta = (u32, Event);

enum Command {
    Submit {
        sequence: NewSequence,
        choice: u32,
        is_cut: bool,
        to: UnboundedSender<Delta>,
        /// What its prompt is fetched by; it ends with the fetch.
        claim: Option<Claim>,
    },
    Abort(u64),
    /// A hand-over has been fetched.
    Release(u64),
    Reset(oneshot::Sender<bool>),
    Restart(oneshot::Sender<()>),
}

/// A worker's part in P/D.
#[derive(Clone, Debug)]
pub struct Part {
    /// What it does for others.
    pub role: Role,
    /// The fleet's hand-overs.
    pub book: Arc<Book>,
    /// How long it keeps blocks for a decode worker.
    pub lease: Duration,
}

/// One worker, shared by its handlers.
#[derive(Debug)]
pub struct Worker {
    served: Served,
    cache_blocks: u32,
    engine: UnboundedSender<Command>,
    board: Arc<Mutex<Board>>,
    part: Part,
    seat: Seat,
    next_id: AtomicU64,
    in_flight: AtomicU32,
    started_s: u64,
}

impl Worker {
    /// Starts the engine's task and the listener's on the runtime this is called in. They end with that runtime.
    ///
    /// # Errors
    /// When the listener does not know its address.
    pub fn start(
        listener: TcpListener,
        served: Served,
        config: EngineConfig,
        part: Part,
    ) -> std::io::Result<Arc<Worker>> {
        let (engine, commands) = mpsc::unbounded_channel();
        let board = Arc::new(Mutex::new(Board::default()));
        let to_engine = engine.clone();
        let release = Box::new(move |number| {
            // A closed channel means that the fleet is stopping, and the blocks with it.
            let _ = to_engine.send(Command::Release(number));
        });
        let seat = part.book.seat(listener.local_addr()?, release);
        let driver = Driver::new(config.clone(), board.clone(), &part, seat);
        let worker = Arc::new(Worker {
            served,
            cache_blocks: config.cache_blocks,
            engine,
            board,
            part,
            seat,
            next_id: AtomicU64::new(1),
            in_flight: AtomicU32::new(0),
            started_s: unix_seconds(),
        });
        tokio::spawn(driver.run(commands));
        let router = router(worker.clone());
        tokio::spawn(async move {
            use axum::serve::ListenerExt;
            let listener = listener.tap_io(|stream| {
                // A token is a small packet that must not wait for the next one.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "no TCP_NODELAY");
                }
            });
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!(%error, "a simulated worker stopped serving");
            }
        });
        Ok(worker)
    }

    /// The totals now.
    pub fn board(&self) -> Board {
        lock(&self.board).clone()
    }

    /// The totals of P/D now.
    pub fn handovers(&self) -> HandoverCounts {
        self.part.book.counts(self.seat)
    }

    /// What it does for others.
    pub fn role(&self) -> Role {
        self.part.role
    }

    fn fresh_id(&self) -> u64 {
        // ORDERING: Relaxed; only uniqueness is asked of it, it publishes nothing.
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Does what the request says about P/D, and counts what is wrong with it. Gives the claim of a prompt that another
    /// worker of this process holds.
    async fn agree(&self, answer: &mut Answer) -> Option<Claim> {
        let (is_asked, is_brought) = (answer.leg.asks_for_handover(), answer.leg.brings_handover());
        let (hands_over, takes_over) = match self.part.role {
            Role::Regular => (is_asked, is_brought),
            Role::Prefill => (is_asked, false),
            Role::Decode => (false, true),
        };
        if self.part.role == Role::Prefill {
            for kind in answer.leg.prefill_violations() {
                self.count_violation(kind);
            }
        }
        let claim = if takes_over {
            self.take_over(answer).await
        } else {
            None
        };
        if hands_over {
            let blocks = answer.handover_blocks(&self.served);
            let book = &self.part.book;
            let (number, params) = book.register(self.seat, answer.prompt_hash, blocks);
            answer.hand_over(number, params);
        }
        claim
    }

    async fn take_over(&self, answer: &mut Answer) -> Option<Claim> {
        let (params, prompt) = (&answer.leg.params, answer.prompt_hash);
        let claimed = match self.part.book.claim(params, prompt, Instant::now()) {
            Err(Violation::UnknownEngine) => remote::claim(params, prompt).await.map(|()| None),
            claimed => claimed.map(Some),
        };
        match claimed {
            Ok(claim) => {
                self.part.book.count_claimed(self.seat);
                answer.take_over();
                claim
            }
            Err(kind) => {
                self.count_violation(kind);
                None
            }
        }
    }

    fn count_violation(&self, kind: Violation) {
        tracing::debug!(kind = kind.label(), "a breach of the P/D protocol");
        self.part.book.count_violation(self.seat, kind);
    }

    /// Hands an answer's sequences to the engine.
    fn submit(
        self: &Arc<Worker>,
        answer: &mut Answer,
        mut claim: Option<Claim>,
    ) -> (Ticket, UnboundedReceiver<Delta>) {
        let (to, deltas) = mpsc::unbounded_channel();
        let mut ids = Vec::with_capacity(answer.choices.len());
        for (nth, choice) in answer.choices.iter_mut().enumerate() {
            let id = self.fresh_id();
            ids.push(id);
            // The chain is of no use to the reply: it moves.
            let sequence = NewSequence {
                id,
                blocks: std::mem::take(&mut choice.sequence.blocks),
                ..choice.sequence.clone()
            };
            let is_cut = choice.is_cut();
            // A closed channel means that the fleet is stopping; the reply then ends without a word.
            let _ = self.engine.send(Command::Submit {
                sequence,
                choice: nth as u32,
                is_cut,
                to: to.clone(),
                claim: claim.take(),
            });
        }
        // ORDERING: Relaxed; a gauge, it publishes nothing.
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        (
            Ticket {
                worker: self.clone(),
                ids,
                is_done: false,
            },
            deltas,
        )
    }
}

fn lock(board: &Mutex<Board>) -> MutexGuard<'_, Board> {
    board.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

/// A request's hold on the engine. Dropped before its end (the client has gone), it aborts what is left.
struct Ticket {
    worker: Arc<Worker>,
    ids: Vec<u64>,
    is_done: bool,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // ORDERING: Relaxed; as in `submit`.
        self.worker.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.is_done {
            for id in &self.ids {
                let _ = self.worker.engine.send(Command::Abort(*id));
            }
        }
    }
}

/// Where a sequence's events go.
struct Client {
    to: UnboundedSender<Delta>,
    choice: u32,
    is_cut: bool,
    submitted_at: Nanos,
    claim: Option<Claim>,
    /// Number of the hand-over that its prompt becomes.
    kept_as: Option<u64>,
}

/// Owns the engine and steps it by the clock.
struct Driver {
    config: EngineConfig,
    engine: Engine,
    clients: AHashMap<u64, Client>,
    board: Arc<Mutex<Board>>,
    book: Arc<Book>,
    seat: Seat,
    lease: Duration,
    /// When which hand-over's lease ends, soonest first: all leases are equally long.
    leases: VecDeque<(Nanos, u64)>,
    epoch: Instant,
    events: Vec<Event>,
}

impl Driver {
    fn new(config: EngineConfig, board: Arc<Mutex<Board>>, part: &Part, seat: Seat) -> Driver {
        Driver {
            engine: Engine::new(config.clone()),
            config,
            clients: AHashMap::new(),
            board,
            book: part.book.clone(),
            seat,
            lease: part.lease,
            leases: VecDeque::new(),
            epoch: Instant::now(),
            events: Vec::new(),
        }
    }

    fn now(&self) -> Nanos {
        self.epoch.elapsed().as_nanos() as Nanos
    }

    async fn run(mut self, mut commands: UnboundedReceiver<Command>) {
        loop {
            let lease_ends = self.leases.front().map(|(at, _)| *at);
            let wake = self.engine.next_wake().into_iter().chain(lease_ends).min();
            let command = match wake {
                None => commands.recv().await,
                Some(at) if at <= self.now() => {
                    // Behind, or an engine that takes no time: let the others run, then go on at once.
                    tokio::task::yield_now().await;
                    None
                }
                Some(at) => {
                    let deadline =
                        tokio::time::Instant::from_std(self.epoch + Duration::from_nanos(at));
                    tokio::select! {
                        command = commands.recv() => command,
                        () = tokio::time::sleep_until(deadline) => None,
                    }
                }
            };
            if command.is_none() && commands.is_closed() && commands.is_empty() {
                return;
            }
            self.turn(command, &mut commands);
        }
    }

    /// What is due, then all commands that wait, then what they make due; then tells everybody.
    fn turn(&mut self, first: Option<Command>, commands: &mut UnboundedReceiver<Command>) {
        let now = self.now();
        self.end_leases(now);
        self.engine.advance(now, &mut self.events);
        let mut next = first.or_else(|| commands.try_recv().ok());
        while let Some(command) = next {
            self.obey(command, now);
            next = commands.try_recv().ok();
        }
        self.engine.advance(now, &mut self.events);
        self.deliver(now);
    }

    fn obey(&mut self, command: Command, now: Nanos) {
        match command {
            Command::Submit {
                sequence,
                choice,
                is_cut,
                to,
                claim,
            } => {
                let (id, kept_as) = (sequence.id, sequence.kept_as);
                let client = Client {
                    to,
                    choice,
                    is_cut,
                    submitted_at: now,
                    claim,
                    kept_as,
                };
                // The API refuses what is longer than the engine; dropping the sender ends the reply all the same.
                if self.engine.submit(sequence).is_ok() {
                    self.clients.insert(id, client);
                } else if let Some(number) = kept_as {
                    self.book.withdraw(number);
                }
            }
            Command::Abort(id) => {
                if self.engine.abort(id) {
                    let client = self.clients.remove(&id);
                    if let Some(number) = client.and_then(|client| client.kept_as) {
                        self.book.withdraw(number);
                    }
                    lock(&self.board).finished[2] += 1;
                }
            }
            Command::Release(number) => {
                self.engine.release_kept(number);
            }
            Command::Restart(reply) => {
                self.restart();
                let _ = reply.send(());
            }
            Command::Reset(reply) => {
                let _ = reply.send(self.engine.reset_prefix_cache());
            }
        }
    }

    /// What crashes and comes back: cache, queue and hand-overs are gone, replies break off, the engine has another id.
    fn restart(&mut self) {
        self.book.restart(self.seat);
        self.engine = Engine::new(self.config.clone());
        self.clients.clear();
        self.leases.clear();
        self.events.clear();
    }

    fn end_leases(&mut self, now: Nanos) {
        while let Some((end, number)) = self.leases.front().copied() {
            if end > now {
                return;
            }
            self.leases.pop_front();
            if self.book.expire(number) {
                self.engine.release_kept(number);
            }
        }
    }

    fn deliver(&mut self, now: Nanos) {
        let mut events = std::mem::take(&mut self.events);
        let shared = self.board.clone();
        let mut board = lock(&shared);
        for event in events.drain(..) {
            self.deliver_one(event, now, &mut board);
        }
        board.engine = self.engine.stats();
        self.events = events;
    }

    fn deliver_one(&mut self, event: Event, now: Nanos, board: &mut Board) {
        let (id, is_first, is_last) = match event {
            Event::Prefilled { id, is_last, .. } => (id, true, is_last),
            Event::Token { id, is_last, .. } => (id, false, is_last),
        };
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let seconds = Duration::from_nanos(now.saturating_sub(client.submitted_at)).as_secs_f64();
        if is_first {
            board.first_token.observe(seconds);
            // A fetched prompt is here by now: the prefill worker may let its blocks go.
            client.claim = None;
        }
        if let Some(number) = client.kept_as.filter(|_| is_last) {
            // Before the reply that tells of it: whoever reads that may claim it at once.
            let end = now + self.lease.as_nanos() as Nanos;
            self.book
                .open(number, self.epoch + Duration::from_nanos(end));
            self.leases.push_back((end, number));
        }
        // Without a receiver the ticket's abort is on its way; nothing to do here.
        let _ = client.to.send((client.choice, event));
        if is_last {
            board.request.observe(seconds);
            board.finished[usize::from(client.is_cut)] += 1;
            self.clients.remove(&id);
        }
    }
}

/// The worker's endpoints.
fn router(worker: Arc<Worker>) -> Router {
    Router::new()
        .route("/health", get(async || ()))
        .route("/ping", get(async || ()).post(async || ()))
        .route(
            "/version",
            get(async || axum::Json(json!({"version": VERSION}))),
        )
        .route("/v1/models", get(models))
        .route("/metrics", get(metrics))
        .route("/load", get(load))
        .route("/tokenize", post(tokenize))
        .route("/reset_prefix_cache", post(reset))
        .route("/mock/restart", post(restart))
        .route(remote::CLAIM_PATH, post(claim))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses))
        .route("/v1/embeddings", post(embeddings))
        .route("/inference/v1/generate", post(generate_ids))
        .fallback(async || plain_error(StatusCode::NOT_FOUND))
        .method_not_allowed_fallback(async || plain_error(StatusCode::METHOD_NOT_ALLOWED))
        .with_state(worker)
}

/// An error that HTTP itself has a phrase for, as vLLM words it.
fn plain_error(status: StatusCode) -> Response {
    let phrase = status.canonical_reason().unwrap_or("Error");
    refuse(&ApiError {
        status: status.as_u16(),
        message: phrase.to_owned(),
        kind: phrase,
        param: None,
    })
}

fn refuse(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::BAD_REQUEST);
    (status, axum::Json(error.body())).into_response()
}

async fn models(State(worker): State<Arc<Worker>>) -> axum::Json<Value> {
    axum::Json(api::models(&worker.served, worker.started_s))
}

async fn metrics(State(worker): State<Arc<Worker>>) -> Response {
    let served = &worker.served;
    let board = worker.board();
    let text = board.exposition(&served.model, served.block_tokens, worker.cache_blocks)
        + &board.handover_exposition(&worker.handovers());
    (
        [(
            header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        text,
    )
        .into_response()
}

async fn load(State(worker): State<Arc<Worker>>) -> axum::Json<Value> {
    // ORDERING: Relaxed; a gauge.
    axum::Json(json!({"server_load": worker.in_flight.load(Ordering::Relaxed)}))
}

async fn reset(State(worker): State<Arc<Worker>>) -> Response {
    let (reply, done) = oneshot::channel();
    let _ = worker.engine.send(Command::Reset(reply));
    match done.await {
        Ok(true) => StatusCode::OK.into_response(),
        // vLLM does nothing while blocks are in use and says so in its log only; a test wants to know.
        Ok(false) => plain_error(StatusCode::CONFLICT),
        Err(_) => plain_error(StatusCode::SERVICE_UNAVAILABLE),
    }
}

/// Not vLLM's: for tests of what happens to hand-overs when an engine dies.
async fn restart(State(worker): State<Arc<Worker>>) -> Response {
    let (reply, done) = oneshot::channel();
    let _ = worker.engine.send(Command::Restart(reply));
    match done.await {
        Ok(()) => StatusCode::OK.into_response(),
        Err(_) => plain_error(StatusCode::SERVICE_UNAVAILABLE),
    }
}

/// Not vLLM's: a decode worker of another process wants what one of this process has handed over.
async fn claim(State(worker): State<Arc<Worker>>, request: Request) -> Response {
    let asked = match read_json(request).await {
        Ok((_, body)) => serde_json::from_slice::<Value>(&body).unwrap_or_default(),
        Err(error) => return refuse(&error),
    };
    let prompt = asked["prompt_hash"].as_u64().unwrap_or(0);
    let book = &worker.part.book;
    let claimed = book.claim(&asked["params"], prompt, Instant::now());
    axum::Json(remote::verdict(claimed.map(drop))).into_response()
}

async fn tokenize(State(worker): State<Arc<Worker>>, request: Request) -> Response {
    let reply = match read_json(request).await {
        Ok((_, body)) => api::tokenize(&worker.served, &body),
        Err(error) => Err(error),
    };
    match reply {
        Ok(value) => axum::Json(value).into_response(),
        Err(error) => refuse(&error),
    }
}

async fn chat(State(worker): State<Arc<Worker>>, request: Request) -> Response {
    generate(worker, Dialect::Chat, request).await
}

async fn completions(State(worker): State<Arc<Worker>>, request: Request) -> Response {
    generate(worker, Dialect::Completion, request).await
}

async fn responses(State(worker): State<Arc<Worker>>, request: Request) -> Response {
    generate(worker, Dialect::Response, request).await
}

async fn embeddings(State(worker): State<Arc<Worker>>, request: Request) -> Response {
    generate(worker, Dialect::Embedding, request).await
}

async fn generate_ids(State(worker): State<Arc<Worker>>, request: Request) -> Response {
    generate(worker, Dialect::Generate, request).await
}

/// Reads a JSON body whole. As in vLLM, another content type is refused.
async fn read_json(request: Request) -> Result<(HeaderMap, Bytes), ApiError> {
    let (head, body) = request.into_parts();
    let content_type = head
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let media_type = content_type
        .unwrap_or("")
        .split(';')
        .next()
        .unwrap_or("")
        .trim();
    let refusal = |status: u16, kind, message: &str| ApiError {
        status,
        message: message.to_owned(),
        kind,
        param: None,
    };
    if !media_type.eq_ignore_ascii_case("application/json") {
        let message = "Unsupported Media Type: Only 'application/json' is allowed";
        return Err(refusal(400, "Bad Request", message));
    }
    match axum::body::to_bytes(body, BODY_BYTES_MAX).await {
        Ok(bytes) => Ok((head.headers, bytes)),
        Err(_) => Err(refusal(
            413,
            "Request Entity Too Large",
            "The body is too long, or its client has left.",
        )),
    }
}

async fn generate(worker: Arc<Worker>, dialect: Dialect, request: Request) -> Response {
    let (headers, body) = match read_json(request).await {
        Ok(read) => read,
        Err(error) => return refuse(&error),
    };
    let request_id = match headers
        .get("x-request-id")
        .and_then(|value| value.to_str().ok())
    {
        Some(id) => id.to_owned(),
        None => format!(
            "{:016x}{:016x}",
            xxhash_rust::xxh3::xxh3_64(&body),
            worker.fresh_id()
        ),
    };
    let mut answer = match api::parse(dialect, &worker.served, &body, &request_id, unix_seconds()) {
        Ok(answer) => answer,
        Err(error) => return refuse(&error),
    };
    drop(body);
    let claim = if answer.is_generated() {
        worker.agree(&mut answer).await
    } else {
        None
    };
    let (ticket, deltas) = worker.submit(&mut answer, claim);
    if answer.is_stream {
        stream(answer, ticket, deltas)
    } else {
        collect(answer, ticket, deltas).await
    }
}

async fn collect(
    mut answer: Answer,
    mut ticket: Ticket,
    mut deltas: UnboundedReceiver<Delta>,
) -> Response {
    while let Some((choice, event)) = deltas.recv().await {
        if answer.note(choice, event) {
            ticket.is_done = true;
            return axum::Json(answer.reply()).into_response();
        }
    }
    plain_error(StatusCode::SERVICE_UNAVAILABLE)
}

fn stream(answer: Answer, ticket: Ticket, deltas: UnboundedReceiver<Delta>) -> Response {
    let body = EventBody {
        writer: EventWriter::new(answer),
        ticket: Some(ticket),
        deltas,
    };
    let mut response = Response::new(Body::new(body));
    let media_type = HeaderValue::from_static("text/event-stream; charset=utf-8");
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, media_type);
    response
}

/// A streamed reply: each frame is what the engine has brought since the last one.
struct EventBody {
    writer: EventWriter,
    /// `None` once the reply is complete.
    ticket: Option<Ticket>,
    deltas: UnboundedReceiver<Delta>,
}

impl hyper::body::Body for EventBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let this = &mut *self;
        let Some(ticket) = &mut this.ticket else {
            return Poll::Ready(None);
        };
        let mut out = Vec::new();
        loop {
            match this.deltas.poll_recv(context) {
                Poll::Ready(Some((choice, event))) => {
                    if this.writer.write(choice, event, &mut out) {
                        ticket.is_done = true;
                        this.ticket = None;
                        return Poll::Ready(Some(Ok(Frame::data(out.into()))));
                    }
                }
                // The engine is gone in the middle: the reply must not look complete.
                Poll::Ready(None) => {
                    return Poll::Ready(Some(Err(std::io::ErrorKind::BrokenPipe.into())));
                }
                Poll::Pending if out.is_empty() => return Poll::Pending,
                Poll::Pending => return Poll::Ready(Some(Ok(Frame::data(out.into())))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpStream;

    use super::super::{FleetArgs, SimFleet, SimStats, SpeedArgs, start_fleet};
    use super::*;

    /// An engine that takes no time and has little room, but for what a test changes.
    fn speed() -> SpeedArgs {
        SpeedArgs {
            output_tokens: 10,
            num_gpu_blocks: 1000,
            max_model_len: 4000,
            ..SpeedArgs::instant()
        }
    }

    fn fleet(speed: SpeedArgs) -> SimFleet {
        fleet_of(&[Role::Regular], speed)
    }

    fn fleet_of(roles: &[Role], speed: SpeedArgs) -> SimFleet {
        let host = [127, 0, 0, 1].into();
        start_fleet(&FleetArgs {
            host,
            port: 0,
            roles: roles.to_vec(),
            model: "mock".into(),
            speed,
            threads: 1,
        })
        .unwrap()
    }

    fn connect(fleet: &SimFleet) -> TcpStream {
        connect_nth(fleet, 0)
    }

    fn connect_nth(fleet: &SimFleet, nth: usize) -> TcpStream {
        let url = fleet.urls().remove(nth);
        TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap()
    }

    fn send(stream: &mut TcpStream, method: &str, path: &str, content_type: &str, body: &str) {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {content_type}\r\nx-request-id: r1\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
    }

    /// Status, content type and body of one reply; the connection stays usable.
    fn receive(stream: &mut TcpStream) -> (u16, String, String) {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        let mut next = |reader: &mut BufReader<&mut TcpStream>| {
            line.clear();
            reader.read_line(&mut line).unwrap();
            line.trim_end().to_owned()
        };
        let status = next(&mut reader)
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        let (mut length, mut media_type) = (None, String::new());
        loop {
            let field = next(&mut reader);
            match field.split_once(": ") {
                None => break,
                Some(("content-length", value)) => length = value.parse::<usize>().ok(),
                Some(("content-type", value)) => media_type = value.to_owned(),
                Some(_) => {}
            }
        }
        let mut body = Vec::new();
        if let Some(length) = length {
            body.resize(length, 0);
            reader.read_exact(&mut body).unwrap();
        } else {
            loop {
                let size = usize::from_str_radix(&next(&mut reader), 16).unwrap();
                let start = body.len();
                body.resize(start + size, 0);
                reader.read_exact(&mut body[start..]).unwrap();
                next(&mut reader);
                if size == 0 {
                    break;
                }
            }
        }
        (status, media_type, String::from_utf8(body).unwrap())
    }

    fn ask(fleet: &SimFleet, method: &str, path: &str, body: &str) -> (u16, Value) {
        ask_nth(fleet, 0, method, path, body)
    }

    fn ask_nth(fleet: &SimFleet, nth: usize, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = connect_nth(fleet, nth);
        send(&mut stream, method, path, "application/json", body);
        let (status, _, body) = receive(&mut stream);
        (
            status,
            serde_json::from_str(&body).unwrap_or(Value::String(body)),
        )
    }

    /// Waits for a state that must come: by asking again, never by guessing a time.
    fn until(fleet: &SimFleet, what: &str, is_so: impl Fn(&SimStats) -> bool) {
        until_nth(fleet, 0, what, is_so);
    }

    fn until_nth(fleet: &SimFleet, nth: usize, what: &str, is_so: impl Fn(&SimStats) -> bool) {
        let limit = Instant::now() + Duration::from_secs(20);
        while !is_so(&fleet.stats()[nth]) {
            assert!(Instant::now() < limit, "{what}: {:?}", fleet.stats());
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_small_endpoints_answer_in_vllms_shapes() {
        let fleet = fleet(speed());
        assert_eq!(ask(&fleet, "GET", "/health", ""), (200, json!("")));
        assert!(ask(&fleet, "GET", "/version", "").1["version"].is_string());
        let (status, models) = ask(&fleet, "GET", "/v1/models", "");
        let model = &models["data"][0];
        assert_eq!(
            (status, &model["id"], &model["owned_by"]),
            (200, &json!("mock"), &json!("vllm"))
        );
        assert_eq!(
            (&model["max_model_len"], &model["root"]),
            (&json!(4000), &json!("mock"))
        );
        assert_eq!(model["permission"][0]["object"], "model_permission");
        assert_eq!(ask(&fleet, "GET", "/load", "").1, json!({"server_load": 0}));
        let (status, tokens) = ask(
            &fleet,
            "POST",
            "/tokenize",
            r#"{"model":"mock","prompt":"123456789"}"#,
        );
        assert_eq!((status, &tokens["count"]), (200, &json!(3)));
        assert_eq!(tokens["tokens"].as_array().unwrap().len(), 3);
        assert_eq!(ask(&fleet, "POST", "/reset_prefix_cache", "").0, 200);
    }

    #[test]
    fn refusals_have_openais_shape() {
        let fleet = fleet(speed());
        let chat = "/v1/chat/completions";
        let other = r#"{"model":"other","messages":[{"role":"user","content":"x"}]}"#;
        for (method, path, body, status) in [
            ("POST", chat, "{", 400),
            ("POST", chat, "{}", 400),
            ("POST", chat, other, 404),
            ("GET", chat, "", 405),
            ("GET", "/nowhere", "", 404),
        ] {
            let (got, reply) = ask(&fleet, method, path, body);
            assert_eq!(got, status, "{method} {path} {body}");
            assert_eq!(reply["error"]["code"], status);
            assert!(reply["error"]["message"].is_string() && reply["error"]["type"].is_string());
        }
        let mut stream = connect(&fleet);
        send(&mut stream, "POST", chat, "text/plain", other);
        assert_eq!(receive(&mut stream).0, 400, "another content type");
    }

    #[test]
    fn a_repeated_prompt_is_reported_as_cached_and_counted_in_metrics() {
        let fleet = fleet(speed());
        let text = "word ".repeat(60);
        let body = json!({"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 5});
        let cached = |reply: &Value| {
            reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .unwrap()
        };
        let (status, first) = ask(&fleet, "POST", "/v1/chat/completions", &body.to_string());
        assert_eq!(
            (status, cached(&first), &first["id"]),
            (200, 0, &json!("chatcmpl-r1"))
        );
        assert_eq!(first["choices"][0]["finish_reason"], "length");
        assert_eq!(
            first["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
                .len(),
            20
        );
        assert_eq!(first["usage"]["completion_tokens"], 5);
        let (_, second) = ask(&fleet, "POST", "/v1/chat/completions", &body.to_string());
        let prompt = second["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(cached(&second), (prompt - 1) / 16 * 16);
        let (_, page) = ask(&fleet, "GET", "/metrics", "");
        let page = page.as_str().unwrap();
        let labels = "engine=\"0\",model_name=\"mock\"";
        for line in [
            format!(
                "vllm:prefix_cache_hits_total{{{labels}}} {}\n",
                cached(&second)
            ),
            format!(
                "vllm:prefix_cache_queries_total{{{labels}}} {}\n",
                2 * prompt
            ),
            format!("vllm:generation_tokens_total{{{labels}}} 10\n"),
            format!("vllm:request_success_total{{{labels},finished_reason=\"length\"}} 2\n"),
            format!("vllm:num_requests_running{{{labels}}} 0.0\n"),
        ] {
            assert!(page.contains(&line), "{line}in {page}");
        }
        assert_eq!(ask(&fleet, "POST", "/reset_prefix_cache", "").0, 200);
        let (_, third) = ask(&fleet, "POST", "/v1/chat/completions", &body.to_string());
        assert_eq!(cached(&third), 0);
    }

    #[test]
    fn a_stream_ends_with_usage_and_done_and_keeps_the_connection() {
        let fleet = fleet(speed());
        let mut stream = connect(&fleet);
        for path in [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/chat/completions",
        ] {
            let body = json!({"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "stream": true,
                "max_tokens": 7, "ignore_eos": true, "stream_options": {"include_usage": true}});
            send(
                &mut stream,
                "POST",
                path,
                "application/json; charset=utf-8",
                &body.to_string(),
            );
            let (status, media_type, text) = receive(&mut stream);
            assert_eq!(
                (status, media_type.as_str()),
                (200, "text/event-stream; charset=utf-8")
            );
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
            let chunks: Vec<Value> = text
                .split("\n\n")
                .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
                .collect();
            let (usage, told) = chunks.split_last().unwrap();
            assert_eq!(
                (&usage["choices"], &usage["usage"]["completion_tokens"]),
                (&json!([]), &json!(7))
            );
            assert_eq!(
                told.last().unwrap()["choices"][0]["finish_reason"],
                "length"
            );
            assert!(told.iter().all(|chunk| chunk.get("usage").is_none()));
        }
    }

    #[test]
    fn embeddings_and_responses_answer() {
        let fleet = fleet(speed());
        let (status, reply) = ask(
            &fleet,
            "POST",
            "/v1/embeddings",
            r#"{"model":"mock","input":["a","b"]}"#,
        );
        assert_eq!((status, reply["data"].as_array().unwrap().len()), (200, 2));
        assert_eq!(
            (
                &reply["usage"]["completion_tokens"],
                &reply["usage"]["prompt_tokens"]
            ),
            (&json!(0), &json!(2))
        );
        let vector = reply["data"][1]["embedding"].as_array().unwrap();
        let norm: f64 = vector.iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
        assert!((norm - 1.0).abs() < 1e-3);
        let (status, reply) = ask(
            &fleet,
            "POST",
            "/v1/responses",
            r#"{"model":"mock","input":"hi"}"#,
        );
        assert_eq!(
            (status, &reply["status"], &reply["object"]),
            (200, &json!("completed"), &json!("response"))
        );
        assert!(
            reply["output"][0]["content"][0]["text"]
                .as_str()
                .unwrap()
                .len()
                > 10
        );
    }

    /// A streamed and a plain client both leave in the middle: the engine is empty soon after, and takes the next.
    #[test]
    fn a_client_that_leaves_frees_its_place() {
        let fleet = fleet(SpeedArgs {
            itl: 1.0,
            max_num_seqs: 1,
            ..speed()
        });
        for is_stream in [true, false] {
            let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": is_stream,
                "max_tokens": 3900, "ignore_eos": true});
            let mut first = connect(&fleet);
            send(
                &mut first,
                "POST",
                "/v1/chat/completions",
                "application/json",
                &body.to_string(),
            );
            until(&fleet, "it runs", |stats| stats.running == 1);
            let mut second = connect(&fleet);
            send(
                &mut second,
                "POST",
                "/v1/chat/completions",
                "application/json",
                &body.to_string(),
            );
            until(&fleet, "the second waits for its place", |stats| {
                stats.waiting == 1
            });
            let before = fleet.stats()[0].aborted;
            drop(second);
            until(&fleet, "the waiting one is gone", |stats| {
                stats.waiting == 0
            });
            drop(first);
            until(&fleet, "the running one is gone", |stats| {
                stats.running == 0
            });
            assert_eq!(fleet.stats()[0].aborted, before + 2);
            assert_eq!(ask(&fleet, "GET", "/load", "").1, json!({"server_load": 0}));
        }
        assert_eq!(fleet.stats()[0].finished, 0);
        let small = r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":2}"#;
        assert_eq!(ask(&fleet, "POST", "/v1/chat/completions", small).0, 200);
    }

    // ---- prefill and decode ----

    const PREFILL: usize = 0;
    const DECODE: usize = 1;
    const CHAT: &str = "/v1/chat/completions";

    fn pd_fleet(speed: SpeedArgs) -> SimFleet {
        fleet_of(&[Role::Prefill, Role::Decode], speed)
    }

    /// 1000 bytes of text and the template's: 64 tokens a block's worth and more.
    fn prompt(text: &str) -> Value {
        json!({"messages": [{"role": "user", "content": text.repeat(1000 / text.len())}]})
    }

    fn with(body: &Value, fields: Value) -> String {
        let mut body = body.clone();
        let fields = fields.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(fields);
        body.to_string()
    }

    fn asking() -> Value {
        json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null})
    }

    /// The prefill leg as a router must send it; gives the whole reply.
    fn prefill(fleet: &SimFleet, prompt: &Value) -> Value {
        let leg = json!({"max_tokens": 1, "min_tokens": 1, "stream": false, "kv_transfer_params": asking()});
        let (status, reply) = ask_nth(fleet, PREFILL, "POST", CHAT, &with(prompt, leg));
        assert_eq!(status, 200, "{reply}");
        reply
    }

    fn decode(fleet: &SimFleet, prompt: &Value, params: &Value) -> Value {
        let leg = json!({"max_tokens": 5, "kv_transfer_params": params});
        let (status, reply) = ask_nth(fleet, DECODE, "POST", CHAT, &with(prompt, leg));
        assert_eq!(status, 200, "{reply}");
        reply
    }

    fn tokens(reply: &Value) -> (u64, u64) {
        let usage = &reply["usage"];
        let cached = &usage["prompt_tokens_details"]["cached_tokens"];
        (
            usage["prompt_tokens"].as_u64().unwrap(),
            cached.as_u64().unwrap(),
        )
    }

    fn violations(fleet: &SimFleet, nth: usize) -> Vec<(&'static str, u64)> {
        let counts = fleet.stats()[nth].handovers;
        counts.violations_by_kind().collect()
    }

    #[test]
    fn a_prompt_goes_from_prefill_to_decode_and_its_blocks_are_freed() {
        let fleet = pd_fleet(speed());
        let ask = prompt("a");
        let first = prefill(&fleet, &ask);
        let (all, cached) = tokens(&first);
        assert_eq!(cached, 0, "prefill reports what it had");
        let params = &first["kv_transfer_params"];
        let blocks = params["remote_block_ids"].as_array().unwrap().len();
        assert_eq!(blocks as u64, all.div_ceil(16));
        let stats = &fleet.stats()[PREFILL];
        assert_eq!(stats.pinned_blocks as usize, blocks);
        assert!((stats.usage - blocks as f64 / 1000.0).abs() < 1e-9);
        assert_eq!(
            ask_nth(&fleet, PREFILL, "POST", "/reset_prefix_cache", "").0,
            409
        );
        let answer = decode(&fleet, &ask, params);
        assert_eq!(tokens(&answer), (all, all), "decode reports all as cached");
        assert_eq!(answer["kv_transfer_params"], Value::Null);
        until(&fleet, "the blocks are free", |stats| {
            stats.pinned_blocks == 0
        });
        let second = prefill(&fleet, &ask);
        assert_eq!(tokens(&second).1, (all - 1) / 16 * 16, "and still cached");
        let counts = fleet.stats()[PREFILL].handovers;
        assert_eq!((counts.issued, counts.fetched, counts.open()), (2, 1, 1));
        assert_eq!(fleet.stats()[DECODE].handovers.claimed, 1);
        assert!(violations(&fleet, PREFILL).is_empty() && violations(&fleet, DECODE).is_empty());
        assert_eq!(fleet.stats()[DECODE].cached_tokens, 0);
    }

    #[test]
    fn every_breach_of_a_decode_leg_is_counted_and_its_prompt_recomputed() {
        let fleet = pd_fleet(speed());
        let ask = prompt("b");
        let params = prefill(&fleet, &ask)["kv_transfer_params"].clone();
        let mut expected = Vec::new();
        let mut breach = |kind: &'static str, ask: &Value, params: &Value| {
            ask_nth(&fleet, DECODE, "POST", "/reset_prefix_cache", "");
            assert_eq!(
                tokens(&decode(&fleet, ask, params)).1,
                0,
                "{kind}: recomputed"
            );
            expected.push((kind, 1));
            let mut counted = violations(&fleet, DECODE);
            counted.sort_unstable();
            let mut wanted = expected.clone();
            wanted.sort_unstable();
            assert_eq!(counted, wanted);
        };
        breach("missing", &ask, &Value::Null);
        breach("prompt_differs", &prompt("c"), &params);
        let mut altered = params.clone();
        altered["tp_size"] = json!(2);
        breach("altered", &ask, &altered);
        decode(&fleet, &ask, &params);
        breach("reused", &ask, &params);
        let old = prefill(&fleet, &ask)["kv_transfer_params"].clone();
        assert_eq!(ask_nth(&fleet, PREFILL, "POST", "/mock/restart", "").0, 200);
        assert_eq!(
            tokens(&prefill(&fleet, &ask)).1,
            0,
            "a restart empties the cache"
        );
        breach("unknown_engine", &ask, &old);
        let (_, page) = ask_nth(&fleet, DECODE, "GET", "/metrics", "");
        let line = "mock_worker_pd_violations_total{kind=\"unknown_engine\"} 1\n";
        assert!(page.as_str().unwrap().contains(line), "{page}");
    }

    #[test]
    fn every_breach_of_a_prefill_leg_is_counted() {
        let fleet = pd_fleet(speed());
        let ask = prompt("d");
        for (fields, kind) in [
            (json!({"max_tokens": 1}), "prefill_params"),
            (
                json!({"max_tokens": 2, "kv_transfer_params": asking()}),
                "prefill_max_tokens",
            ),
            (
                json!({"max_tokens": 1, "stream": true, "kv_transfer_params": asking()}),
                "prefill_stream",
            ),
        ] {
            let before: u64 = fleet.stats()[PREFILL].handovers.violations_total();
            assert_eq!(
                ask_nth(&fleet, PREFILL, "POST", CHAT, &with(&ask, fields)).0,
                200
            );
            let counted = violations(&fleet, PREFILL);
            assert!(counted.contains(&(kind, 1)), "{kind} in {counted:?}");
            let after = fleet.stats()[PREFILL].handovers.violations_total();
            assert_eq!(after, before + 1, "{kind}");
        }
        for fields in [
            json!({"max_tokens": 1, "min_tokens": 2, "kv_transfer_params": asking()}),
            json!({"max_tokens": 1, "stream_options": {}, "kv_transfer_params": asking()}),
        ] {
            assert_eq!(
                ask_nth(&fleet, PREFILL, "POST", CHAT, &with(&ask, fields)).0,
                400
            );
        }
        // The other limits' names, and the reply of the Responses API.
        for (path, fields) in [
            (CHAT, json!({"max_completion_tokens": 1, "max_tokens": 100})),
            ("/v1/completions", json!({"prompt": "x", "max_tokens": 1})),
            (
                "/v1/responses",
                json!({"input": "x", "max_output_tokens": 1}),
            ),
            (
                "/inference/v1/generate",
                json!({"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}),
            ),
        ] {
            let fields = with(&fields, json!({"kv_transfer_params": asking()}));
            let leg = with(&ask, serde_json::from_str(&fields).unwrap());
            let (status, reply) = ask_nth(&fleet, PREFILL, "POST", path, &leg);
            assert_eq!(
                (status, &reply["kv_transfer_params"]["tp_size"]),
                (200, &json!(1))
            );
        }
        assert_eq!(fleet.stats()[PREFILL].handovers.violations_total(), 3);
    }

    #[test]
    fn a_handover_that_nobody_fetches_expires_and_frees_its_blocks() {
        let fleet = pd_fleet(SpeedArgs {
            kv_lease: 0.05,
            ..speed()
        });
        let ask = prompt("e");
        let params = prefill(&fleet, &ask)["kv_transfer_params"].clone();
        until(&fleet, "the lease ends", |stats| {
            stats.handovers.expired == 1
        });
        until(&fleet, "the blocks are free", |stats| {
            stats.pinned_blocks == 0
        });
        decode(&fleet, &ask, &params);
        assert_eq!(violations(&fleet, DECODE), [("expired", 1)]);
        let (_, page) = ask_nth(&fleet, PREFILL, "GET", "/metrics", "");
        let line = "mock_worker_pd_expired_handovers_total 1\n";
        assert!(page.as_str().unwrap().contains(line), "{page}");
    }

    /// The room is for one prompt: the second is computed once the first has been fetched.
    #[test]
    fn pinned_blocks_keep_the_next_prompt_waiting() {
        let fleet = pd_fleet(SpeedArgs {
            num_gpu_blocks: 30,
            ..speed()
        });
        let params = prefill(&fleet, &prompt("f"))["kv_transfer_params"].clone();
        let mut second = connect_nth(&fleet, PREFILL);
        let leg = json!({"max_tokens": 1, "kv_transfer_params": asking()});
        let body = with(&prompt("g"), leg);
        send(&mut second, "POST", CHAT, "application/json", &body);
        until(&fleet, "it waits", |stats| stats.waiting == 1);
        decode(&fleet, &prompt("f"), &params);
        assert_eq!(receive(&mut second).0, 200);
    }

    /// A decode client that leaves while it waits for its place still frees the blocks of the prefill worker.
    #[test]
    fn a_claim_whose_client_leaves_frees_the_blocks() {
        let fleet = pd_fleet(SpeedArgs {
            itl: 1.0,
            max_num_seqs: 1,
            ..speed()
        });
        let ask = prompt("h");
        let params = prefill(&fleet, &ask)["kv_transfer_params"].clone();
        let mut running = connect_nth(&fleet, DECODE);
        let long = json!({"max_tokens": 3000, "ignore_eos": true});
        send(
            &mut running,
            "POST",
            CHAT,
            "application/json",
            &with(&ask, long),
        );
        let mut leaving = connect_nth(&fleet, DECODE);
        let leg = with(&ask, json!({"kv_transfer_params": params}));
        until_nth(&fleet, DECODE, "it runs", |stats| stats.running == 1);
        send(&mut leaving, "POST", CHAT, "application/json", &leg);
        until_nth(&fleet, DECODE, "it waits", |stats| stats.waiting == 1);
        assert!(fleet.stats()[PREFILL].pinned_blocks > 0, "not yet fetched");
        drop(leaving);
        until(&fleet, "the blocks are free", |stats| {
            stats.pinned_blocks == 0
        });
        assert_eq!(fleet.stats()[PREFILL].handovers.fetched, 1);
    }

    /// The answer has thousands of tokens to come when the prefill worker has its blocks back.
    #[test]
    fn the_blocks_are_free_after_the_fetch_not_after_the_answer() {
        let fleet = pd_fleet(SpeedArgs {
            itl: 5.0,
            ..speed()
        });
        let ask = prompt("k");
        let params = prefill(&fleet, &ask)["kv_transfer_params"].clone();
        let leg = json!({"max_tokens": 3600, "ignore_eos": true, "kv_transfer_params": params});
        let mut answered = connect_nth(&fleet, DECODE);
        send(
            &mut answered,
            "POST",
            CHAT,
            "application/json",
            &with(&ask, leg),
        );
        until(&fleet, "fetched", |stats| stats.handovers.fetched == 1);
        until(&fleet, "free", |stats| stats.pinned_blocks == 0);
        assert_eq!(fleet.stats()[DECODE].running, 1, "and it goes on");
    }

    /// Two fleets have a book each, as two processes have.
    #[test]
    fn a_decode_worker_of_another_process_asks_the_one_that_is_named() {
        let (issuer, taker) = (pd_fleet(speed()), pd_fleet(speed()));
        let ask = prompt("i");
        let params = prefill(&issuer, &ask)["kv_transfer_params"].clone();
        let (all, cached) = tokens(&decode(&taker, &ask, &params));
        assert_eq!(all, cached);
        until(&issuer, "the blocks are free", |stats| {
            stats.pinned_blocks == 0
        });
        assert_eq!(issuer.stats()[PREFILL].handovers.fetched, 1);
        decode(&taker, &ask, &params);
        assert_eq!(violations(&taker, DECODE), [("reused", 1)]);
        let late = prefill(&issuer, &ask)["kv_transfer_params"].clone();
        issuer.stop();
        decode(&taker, &ask, &late);
        let counted = violations(&taker, DECODE);
        assert_eq!(counted, [("reused", 1), ("unknown_engine", 1)]);
    }

    #[test]
    fn a_regular_worker_does_what_it_is_asked_and_demands_nothing() {
        let fleet = fleet_of(&[Role::Regular, Role::Regular], speed());
        let ask = prompt("j");
        assert_eq!(ask_nth(&fleet, 0, "POST", CHAT, &ask.to_string()).0, 200);
        let params = prefill(&fleet, &ask)["kv_transfer_params"].clone();
        let (all, cached) = tokens(&decode(&fleet, &ask, &params));
        assert_eq!(all, cached);
        decode(&fleet, &ask, &params);
        assert!(violations(&fleet, 0).is_empty());
        assert_eq!(violations(&fleet, 1), [("reused", 1)]);
    }

    #[test]
    fn a_stopped_fleet_is_gone() {
        let fleet = fleet(speed());
        let mut stream = connect(&fleet);
        let address = stream.peer_addr().unwrap();
        fleet.stop();
        assert_eq!(
            stream.read(&mut [0; 1]).unwrap_or(0),
            0,
            "open connections are cut"
        );
        assert!(TcpStream::connect(address).is_err(), "nobody listens");
    }
}
