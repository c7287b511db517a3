//! What-if: fleets of simulated workers behind Corelane's real policies and books. See [`world`].

pub mod agenda;
pub mod content;
pub mod engine;
mod formula;
mod judge;
pub mod kv;
pub mod policy;
pub mod router;
pub mod swe_bench_pro;
pub mod tally;
pub mod workload;
pub mod world;
