//! What the fuzz targets share: readers that are slow and obvious and have none of the router's own code, and worlds for
//! its state machine. The targets are in `targets/`, their seeds in `seeds/`, words of their inputs in `dictionaries/`.
//!
//! Run all for a moment: `.ci/fuzz 10`. One for long: see there.

pub mod cases;
pub mod common;
pub mod json;
pub mod naive;
pub mod wire;

#[allow(
    dead_code,
    unused_imports,
    reason = "only one schedule is played of it"
)]
#[path = "../../tests/simulation.rs"]
pub mod simulation;

#[allow(
    dead_code,
    unused_imports,
    reason = "only one schedule is played of it"
)]
#[path = "../../tests/pd_simulation.rs"]
pub mod pd_simulation;
