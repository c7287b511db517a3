//! Prompts of text for `kv_aware`: a core hands a request's body over, ordinary threads make its tokens and the keys of their
//! blocks, and tell the core. The core goes on with other requests meanwhile; what takes longer than
//! `--tokenizer-timeout-ms`, or finds the desk full, is placed by the approximate tree.
//!
//! `chat` makes the text of messages, `encode` the ids of a text, `pool` runs the threads. Without the cargo feature
//! `tokenizer` there are none, and [`Desk`] is all of it.
//!
//! Invariants:
//! - K1 (`encode`) remembered ids are those that the whole text would have;
//! - K2 a core never waits for the desk: putting a job there is a few atomics, and one system call if a thread sleeps;
//! - K3 a thread that goes to sleep sees a job put there before (`Doorbell`, D1).

#[cfg(feature = "tokenizer")]
pub mod chat;
#[cfg(feature = "tokenizer")]
pub mod encode;
#[cfg(feature = "tokenizer")]
pub mod pool;

use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;

use crossbeam::queue::ArrayQueue;
use shards::{Doorbell, PrefixHash};

use crate::route::Fields;
use crate::shared::Route;

/// Longest body that is tokenised, in bytes: a core copies it, and longer ones would keep a thread for seconds.
pub const BODY_BYTES_MAX: usize = 4 << 20;
/// Bytes of bodies that may wait; beside them each thread has one at work.
const WAITING_BYTES_MAX: u64 = 64 << 20;

/// How a template takes a message's content; vLLM's `--chat-template-content-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// A text; parts are joined by line feeds.
    String,
    /// A list of parts, as in OpenAI's API.
    OpenAi,
}

/// A model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// The name that requests give; `None`: any other.
    pub model: Option<String>,
    /// A `tokenizer.json`, or the folder it is in.
    pub path: PathBuf,
}

/// A prompt as the exact index is asked for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens.
    pub count: u64,
    /// The keys of its whole blocks.
    pub chain: Vec<PrefixHash>,
}

/// A request whose tokens are wanted.
#[derive(Debug)]
pub struct Job {
    /// The core that asks.
    pub core: usize,
    /// Its name for the connection.
    pub client: u64,
    /// Its number for the request.
    pub number: u64,
    /// The endpoint.
    pub route: Route,
    /// A copy of the body; it comes back with the answer.
    pub body: Vec<u8>,
    /// Its fields.
    pub fields: Fields,
}

/// The answer to a [`Job`].
#[derive(Debug)]
pub struct Done {
    /// As in the job.
    pub client: u64,
    /// As in the job.
    pub number: u64,
    /// `None`: its tokens cannot be told.
    pub prompt: Option<Box<Prompt>>,
    /// The job's.
    pub body: Vec<u8>,
}

/// Why a request's tokens cannot be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Images, sound, or whatever is no text.
    Media,
    /// It asks for something that changes its text in a way that only the engine knows.
    Request,
    /// The model has no template, or it fails for these messages.
    Template,
    /// There is no tokenizer for this model.
    Model,
    /// The tokenizer failed.
    Tokenizer,
}

/// What became of a prompt of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Its tokens were made.
    Made,
    /// Not in time: it was placed by the approximate tree.
    Late,
    /// Too many others waited.
    Full,
    /// Its body is longer than [`BODY_BYTES_MAX`].
    TooLong,
    /// They cannot be made.
    Unfit(Unfit),
}

impl Fate {
    /// All.
    pub const ALL: [Fate; 9] = [
        Fate::Made,
        Fate::Late,
        Fate::Full,
        Fate::TooLong,
        Fate::Unfit(Unfit::Media),
        Fate::Unfit(Unfit::Request),
        Fate::Unfit(Unfit::Template),
        Fate::Unfit(Unfit::Model),
        Fate::Unfit(Unfit::Tokenizer),
    ];

    /// What vllm-router's `kv_routing_inputs_total` calls a prompt that got no tokens.
    pub fn routing_input(self) -> Option<&'static str> {
        match self {
            Fate::Made => None,
            Fate::Late | Fate::Full => Some("preparation_unavailable"),
            Fate::TooLong | Fate::Unfit(Unfit::Request) => Some("unsupported_input"),
            Fate::Unfit(Unfit::Media) => Some("multimodal_input"),
            Fate::Unfit(Unfit::Template | Unfit::Model) => Some("render_unavailable"),
            Fate::Unfit(Unfit::Tokenizer) => Some("preparation_rejected"),
        }
    }

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Fate::Made => "made",
            Fate::Late => "late",
            Fate::Full => "full",
            Fate::TooLong => "too_long",
            Fate::Unfit(Unfit::Media) => "media",
            Fate::Unfit(Unfit::Request) => "unsupported_request",
            Fate::Unfit(Unfit::Template) => "template",
            Fate::Unfit(Unfit::Model) => "unknown_model",
            Fate::Unfit(Unfit::Tokenizer) => "tokenizer_error",
        }
    }
}

/// Where a thread of the pool sleeps.
#[derive(Default)]
struct Bed {
    bell: Doorbell,
    thread: OnceLock<Thread>,
}

/// Where cores put jobs and threads take them. Bounded.
pub struct Desk {
    jobs: ArrayQueue<Job>,
    /// Of their bodies.
    bytes: AtomicU64,
    beds: Box<[Bed]>,
    is_closed: AtomicBool,
    fates: [AtomicU64; Fate::ALL.len()],
    tokens: [AtomicU64; 2],
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk")
            .field("jobs", &self.jobs.len())
            .finish_non_exhaustive()
    }
}

impl Desk {
    /// An empty desk for so many jobs and threads, each at least 1.
    pub fn new(job_count_max: usize, thread_count: usize) -> Desk {
        Desk {
            jobs: ArrayQueue::new(job_count_max.max(1)),
            bytes: AtomicU64::new(0),
            beds: (0..thread_count.max(1)).map(|_| Bed::default()).collect(),
            is_closed: AtomicBool::new(false),
            fates: Default::default(),
            tokens: Default::default(),
        }
    }

    /// Core: puts a job there, and wakes a thread if one sleeps.
    ///
    /// # Errors
    /// Too many wait: the job comes back.
    #[allow(
        clippy::result_large_err,
        reason = "the job is the caller's again, with its buffer"
    )]
    pub fn try_put(&self, job: Job) -> Result<(), Job> {
        let bytes = job.body.len() as u64;
        // ORDERING: Relaxed; a sum that is compared with a limit, the queue carries the job.
        if self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > WAITING_BYTES_MAX {
            self.subtract(bytes);
            return Err(job);
        }
        if let Err(job) = self.jobs.push(job) {
            self.subtract(bytes);
            return Err(job);
        }
        for bed in &self.beds {
            if bed.bell.ring() {
                if let Some(thread) = bed.thread.get() {
                    thread.unpark();
                }
                return Ok(());
            }
        }
        Ok(())
    }

    /// Thread `index`: the next job; sleeps until there is one. `None`: the desk is closed.
    pub fn take(&self, index: usize) -> Option<Job> {
        let bed = &self.beds[index];
        bed.thread.get_or_init(std::thread::current);
        loop {
            // ORDERING: Acquire pairs with close's Release; it publishes nothing else.
            if self.is_closed.load(Ordering::Acquire) {
                return None;
            }
            if let Some(job) = self.jobs.pop() {
                self.subtract(job.body.len() as u64);
                return Some(job);
            }
            bed.bell.announce_sleep();
            // ORDERING: Acquire; as above.
            if self.jobs.is_empty() && !self.is_closed.load(Ordering::Acquire) {
                std::thread::park();
            }
            bed.bell.announce_awake();
        }
    }

    fn subtract(&self, bytes: u64) {
        // ORDERING: Relaxed; as in `try_put`. It was added before the job was pushed.
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Sends all threads home.
    pub fn close(&self) {
        // ORDERING: Release pairs with take's Acquire.
        self.is_closed.store(true, Ordering::Release);
        let threads = self.beds.iter().filter_map(|bed| bed.thread.get());
        threads.for_each(Thread::unpark);
    }

    /// How many threads there are to be.
    pub fn thread_count(&self) -> usize {
        self.beds.len()
    }

    /// Jobs that wait.
    pub fn waiting_count(&self) -> usize {
        self.jobs.len()
    }

    /// Counts a prompt.
    pub fn count(&self, fate: Fate) {
        let place = Fate::ALL.iter().position(|one| *one == fate);
        if let Some(place) = place {
            // ORDERING: Relaxed; a number to show.
            self.fates[place].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts tokens: made anew, and remembered.
    pub fn count_tokens(&self, made: usize, remembered: usize) {
        for (count, more) in self.tokens.iter().zip([made, remembered]) {
            // ORDERING: Relaxed; a number to show.
            count.fetch_add(more as u64, Ordering::Relaxed);
        }
    }

    /// Prompts by what became of them. One that came late is also counted when its tokens are there.
    pub fn fates(&self) -> impl Iterator<Item = (Fate, u64)> {
        // ORDERING: Relaxed; a number to show.
        let counts = self.fates.iter().map(|count| count.load(Ordering::Relaxed));
        Fate::ALL.into_iter().zip(counts)
    }

    /// Tokens made, and tokens remembered.
    pub fn tokens(&self) -> [u64; 2] {
        // ORDERING: Relaxed; a number to show.
        [0, 1].map(|place| self.tokens[place].load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn job(number: u64) -> Job {
        Job {
            core: 0,
            client: 0,
            number,
            route: Route::Completions,
            body: Vec::new(),
            fields: Fields::default(),
        }
    }

    /// K3: every job is taken, once, by threads that sleep in between.
    #[test]
    fn sleeping_threads_take_every_job() {
        let desk = Arc::new(Desk::new(8, 2));
        let takers: Vec<_> = (0..2)
            .map(|index| {
                let desk = desk.clone();
                std::thread::spawn(move || {
                    std::iter::from_fn(|| desk.take(index))
                        .map(|job| job.number)
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        for number in 0..20_000 {
            let mut next = job(number);
            while let Err(back) = desk.try_put(next) {
                next = back;
                std::thread::yield_now();
            }
            if number % 100 == 0 {
                while desk.waiting_count() > 0 {
                    std::thread::yield_now();
                }
            }
        }
        while desk.waiting_count() > 0 {
            std::thread::yield_now();
        }
        desk.close();
        let mut taken: Vec<u64> = takers.into_iter().flat_map(|t| t.join().unwrap()).collect();
        taken.sort_unstable();
        assert_eq!(taken, (0..20_000).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_desk_gives_the_job_back() {
        let desk = Desk::new(1, 1);
        assert!(desk.try_put(job(1)).is_ok());
        assert_eq!(desk.try_put(job(2)).unwrap_err().number, 2);
        let desk = Desk::new(1000, 1);
        let long = |number| Job {
            body: vec![0; BODY_BYTES_MAX],
            ..job(number)
        };
        let fits = WAITING_BYTES_MAX / BODY_BYTES_MAX as u64;
        assert!((0..fits).all(|number| desk.try_put(long(number)).is_ok()));
        assert!(desk.try_put(long(99)).is_err());
        assert!(desk.take(0).is_some());
        assert!(desk.try_put(long(100)).is_ok());
    }
}
