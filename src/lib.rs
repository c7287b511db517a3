//! Corelane: a router for LLM inference. It sends each request to the worker that already holds its prompt's prefix,
//! unless that very worker is the hot one.
//!
//! # One request, from accept to close
//!
//! 1. **accept** Each core has its own listener (SO_REUSEPORT; or all share inherited ones) and its own io_uring. A connection that a core accepts
//!    stays there until it closes ([`core`], [`ring`]). With `--tls-cert` a [`tls::Session`] lies between its socket and all
//!    that follows; another one on the way to a worker with `https://`.
//! 2. **head** The bytes lie in one of the core's shared receive buffers. [`exchange::Session`] looks for a head with
//!    [`http::request::parse`], which takes the strict reading of RFC 9112 and copies the end-to-end fields right behind
//!    a gap in a fresh buffer: the request as it will go on.
//! 3. **endpoint** [`exchange::endpoint`] says how it is treated: inference (body read whole), ours (handed over to
//!    [`control`] whole), anything else (passed through).
//!    Here it is refused, too, if it lacks a key that it needs ([`access`], `exchange::entry`): before any of its body is read.
//! 4. **body** It is put behind the fields in the same buffer. Nothing is re-serialised: the worker gets the client's bytes.
//! 5. **scan** One pass over the JSON finds the fields that matter and refuses what is no JSON ([`route::scan`]).
//! 6. **gate** While fewer than `--max-concurrent-requests` run, all cores together, the request is let in; else it waits
//!    in line, in the order of arrival across cores (`shards::Gate`, `exchange::wait`), and is refused if the line is full.
//!    Under `kv_aware` with `--tokenizer` a prompt of text waits here for its tokens, some 2 ms at most, which are made off the
//!    cores ([`tokenize`], `exchange::tokens`).
//! 7. **key** The prompt's raw bytes become a chain of block hashes ([`route::chain`]); under a policy that hashes, the
//!    session's name ([`route::session_hash`]) or the prompt's begin one hash.
//! 8. **find, score, pick** [`route::decide`] asks the shards (`shards::Tree`, read without a lock from any core) who holds
//!    the longest prefix, compares the thresholds with *that* worker's load, and picks.
//! 9. **seat** `shards::LoadGuard::acquire_at` takes the count if the load is still the one the choice was made on; else
//!    the choice is made anew. The guard lives in the exchange and gives the count back on every way out.
//!    What was decided, and why, is written down ([`decisions`]): for `/debug/decisions`, a request that asks, and the decision log.
//! 10. **lesson** What the chosen worker does not have yet goes to the owners of the shards, by mailbox ([`route::lessons`]).
//! 11. **forward** Request line, `Host` and length are written into the gap, and the buffer leaves over a kept-alive
//!     connection of this core ([`upstream`]) or a new one.
//! 12. **relay** The answer's head is written anew ([`http::response`]); its body goes on as it comes, from the buffer it
//!     was received into. [`http::Body`] only follows the framing to know the end. A slow client stops the reading from
//!     its worker. Where the events of many streams come fast, a core takes those of a moment together (`core::gather`).
//! 13. **release** The exchange is recorded (and its end put beside its decisions) and dropped, the next one in line is let in; both connections are kept if both sides allow.
//!
//! With prefill/decode disaggregation steps 8 to 12 happen twice: both seats are taken at once, the prefill leg's answer
//! is read for its transfer parameters, and the decode leg, which carries them, is relayed (`exchange::pd`). Each leg's
//! body is the client's with spliced edits ([`route::splice`](route::write_prefill)).
//!
//! # Layers (arrows down only; `tests/layering.rs` checks it)
//!
//! ```text
//! main -> core, control, demo      core -> ring, exchange, upstream     exchange -> http, route
//! control -> config, shared        route -> shards                      http -> httparse
//! access: who may ask for what; named by config, exchange and control
//! tls: what lies between a socket and HTTP; named by config, shared, core and control
//! tokenize: tokens of text, made off the cores; named by config, shared, core, exchange and start
//! held: bytes of clients in memory, counted; named by exchange, core and shared
//! decisions: what was decided, for files, questions and the simulator; names log_thread and route, named by shared, core, control, sim and start
//! sim: fleets that do not exist, behind the real policies, books and judge; names config, control, decisions and route
//! bench: a load generator on the same ring and parsers; names http, ring, route and sim (its traces)
//! plot: curves for pages that load nothing; named by sim and bench
//! ```
//!
//! `shared` is what both planes see; `config` is read by all; `access_log` is where cores put their lines, `log_thread` what writes them and the decision log. `listen` and `notify` serve `start`, `main` and the drain, `manual` and `doctor` the subcommands.
//!
//! # Invariants
//!
//! Ids stand at the top of the file that keeps them: B* books, G* gate, A* rate, T* tree, P* publish, N* sessions, K* an engine's names for blocks, D* doorbell (crate `shards`), R* ring, C* core, M* memory, F* the list of workers,
//! E* exchange (there also P1 to P4 the two legs, W* both at once, Q* those who wait), J* standing, I* the exact index,
//! M* bytes held, Z* KV events; T1 and T2 of [`tls`], K* of [`tokenize`], L* of `route::splice` and `control::registration`, and D* of `control::discovery`
//! and [`decisions`] are their own. Each of `shards`' has its loom model in
//! `loom_tests`.
// Every module but `ring` forbids unsafe code, here or in its own file (`tests/layering.rs` checks it).
#![deny(missing_docs)]
#![warn(clippy::dbg_macro, clippy::todo, clippy::unimplemented)]

pub mod access;
#[forbid(unsafe_code)]
pub mod access_log;
#[forbid(unsafe_code)]
pub mod bench;
pub mod config;
pub mod control;
#[forbid(unsafe_code)]
pub mod core;
#[forbid(unsafe_code)]
pub mod decisions;
#[forbid(unsafe_code)]
pub mod demo;
pub mod doctor;
#[forbid(unsafe_code)]
pub mod exchange;
#[forbid(unsafe_code)]
pub mod held;
#[forbid(unsafe_code)]
pub mod http;
pub mod listen;
#[forbid(unsafe_code)]
pub mod log_thread;
pub mod manual;
pub mod notify;
#[forbid(unsafe_code)]
mod plot;
pub mod ring;
#[forbid(unsafe_code)]
pub mod route;
#[forbid(unsafe_code)]
pub mod shared;
#[forbid(unsafe_code)]
pub mod sim;
#[forbid(unsafe_code)]
mod start;
#[forbid(unsafe_code)]
pub mod tls;
#[forbid(unsafe_code)]
pub mod tokenize;
#[forbid(unsafe_code)]
pub mod upstream;

pub use start::{Router, StartError, start, start_on};
