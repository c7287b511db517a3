//! `expected_wait` against its best rivals, on small workloads. `corelane sim knees` is the judgement; this finds out when
//! something broke it.

use super::*;
use crate::sim::set::generated;

/// Its throughput as a share of the best other's.
fn ratio(name: &str, size: f64) -> Verdict {
    let cases = generated(size, 1);
    let case = cases.iter().find(|case| case.name == name);
    let policies = [EXPECTED_WAIT, "llmd_sticky", "cache_aware"].map(String::from);
    let knees = find(case.expect("a case"), &policies, 1, 1).expect("policies that exist");
    knees.verdict().expect("all of them")
}

/// Workers of three speeds of which nobody is told, two of which change: fast ones must not get so much that their caches lose
/// what they held.
#[test]
fn workers_of_different_speeds_are_used_as_well_as_by_the_best_other() {
    let verdict = ratio("heterogeneous", 0.2);
    assert!(verdict.ratio() >= 1.0, "{verdict:?}");
}

/// Four fifths of the traffic share a prefix, which one worker cannot serve. So short a run has hardly begun when its first
/// percent is late, which is why more is lost here than in the whole one.
#[test]
fn a_hot_prefix_costs_little() {
    let verdict = ratio("hot prefix", 0.1);
    assert!(verdict.ratio() >= 0.92, "{verdict:?}");
}
