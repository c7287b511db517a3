//! The roles of workers: each has its own pool, policy and thresholds.

/// What a worker does. Without `--vllm-pd-disaggregation` every worker is regular.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Role {
    /// Whole requests.
    Regular,
    /// The first leg of a P/D request: computes the prompt's KV blocks.
    Prefill,
    /// The second leg: fetches them and generates.
    Decode,
}

impl Role {
    /// All, in the order of their numbers.
    pub const ALL: [Role; 3] = [Role::Regular, Role::Prefill, Role::Decode];

    /// The label in metrics, and the word of the admin API (vllm-router's).
    pub fn label(self) -> &'static str {
        match self {
            Role::Regular => "regular",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}
