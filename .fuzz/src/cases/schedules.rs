//! The state machine of an exchange under orders of events that a core could see: the simulations of `tests/`, with the
//! fuzzer's bytes for their choices. What has to hold they check themselves, after every event.

use crate::{common, pd_simulation, simulation};

/// One leg: `tests/simulation.rs`.
pub fn exchange(data: &[u8]) {
    common::wind(data);
    simulation::schedule();
}

/// Two legs: `tests/pd_simulation.rs`.
pub fn exchange_pd(data: &[u8]) {
    common::wind(data);
    pd_simulation::schedule();
}
