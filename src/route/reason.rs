//! Why a worker was chosen: one word for logs and metrics, and vllm-router's word for the metric the two share.

/// The reason of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Reason {
    /// The worker with the longest match, and it is not overloaded.
    Affinity,
    /// That worker is overloaded: the longest match among those that are not.
    ShedToWarm,
    /// That worker is overloaded and no other is warm: the least loaded.
    ShedToLeastLoaded,
    /// The match is only a prefix that many prompts share: the least loaded, those that hold it first among equals.
    SpreadCommonPrefix,
    /// No match above the threshold: the least loaded.
    Cold,
    /// The request has nothing to make a key of: the least loaded.
    NoKey,
    /// Policy `least_loaded`.
    LeastLoaded,
    /// Policy `round_robin`.
    RoundRobin,
    /// Policy `random`.
    Random,
    /// Policy `power_of_two`.
    PowerOfTwo,
    /// The policies that hash, and bound sessions: the key's own worker.
    Home,
    /// That worker failed this request, is busy, full or coming back: the next one.
    HomeOut,
    /// That worker has more than its bounded share: the next one that has room.
    HomeShed,
    /// `sticky_least_loaded`: the session begins, with the worker that has the fewest.
    NewSession,
    /// `kv_aware`: the least cost, and it holds some of the prompt.
    LeastCostWarm,
    /// `kv_aware`: the least cost, and it is known to hold nothing of it.
    LeastCostCold,
}

impl Reason {
    /// Number of reasons.
    pub const COUNT: usize = 16;

    /// All, in the order of their numbers.
    pub const ALL: [Reason; Reason::COUNT] = [
        Reason::Affinity,
        Reason::ShedToWarm,
        Reason::ShedToLeastLoaded,
        Reason::SpreadCommonPrefix,
        Reason::Cold,
        Reason::NoKey,
        Reason::LeastLoaded,
        Reason::RoundRobin,
        Reason::Random,
        Reason::PowerOfTwo,
        Reason::Home,
        Reason::HomeOut,
        Reason::HomeShed,
        Reason::NewSession,
        Reason::LeastCostWarm,
        Reason::LeastCostCold,
    ];

    /// The label in Corelane's own metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Reason::Affinity => "affinity",
            Reason::ShedToWarm => "shed_hot_worker_to_warm",
            Reason::ShedToLeastLoaded => "shed_hot_worker_to_least_loaded",
            Reason::SpreadCommonPrefix => "spread_common_prefix",
            Reason::Cold => "cold",
            Reason::NoKey => "no_key",
            Reason::LeastLoaded => "least_loaded",
            Reason::RoundRobin => "round_robin",
            Reason::Random => "random",
            Reason::PowerOfTwo => "power_of_two",
            Reason::Home => "home",
            Reason::HomeOut => "home_is_out",
            Reason::HomeShed => "shed_hot_home",
            Reason::NewSession => "new_session",
            Reason::LeastCostWarm => "least_cost_warm",
            Reason::LeastCostCold => "least_cost_cold",
        }
    }

    /// vllm-router's `outcome` label of `prefix_routing_decisions_total` (0.1.17).
    ///
    /// All kinds of shedding are its `load_imbalance`, since load decided and not the prefix. A key's own worker is a
    /// `sticky_hit`. A common prefix that is
    /// spread is a `prefix_miss`: nothing of this prompt's own was found. Policies that look at no prefix are
    /// `load_fallback`, as is a request without a key.
    pub fn outcome(self) -> &'static str {
        match self {
            Reason::Affinity => "prefix_hit",
            Reason::LeastCostWarm => "prefix_hit",
            Reason::LeastCostCold => "prefix_miss",
            Reason::Home => "sticky_hit",
            Reason::ShedToWarm | Reason::ShedToLeastLoaded | Reason::HomeShed => "load_imbalance",
            Reason::SpreadCommonPrefix | Reason::Cold => "prefix_miss",
            Reason::NoKey
            | Reason::LeastLoaded
            | Reason::RoundRobin
            | Reason::Random
            | Reason::PowerOfTwo
            | Reason::HomeOut
            | Reason::NewSession => "load_fallback",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_in_the_order_of_the_numbers_with_labels_of_their_own() {
        for (number, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, number);
            assert_eq!(
                Reason::ALL
                    .iter()
                    .filter(|other| other.label() == reason.label())
                    .count(),
                1
            );
        }
    }
}
