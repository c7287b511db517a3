//! What the cores counted about a slot, added up. A slot serves one life after the other, so each life remembers where
//! the counters stood when it began.

use shards::Slot;

use crate::shared::CoreShared;

/// Sums over all cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Times chosen.
    pub chosen: u64,
    /// Prompt bytes sent, of requests with a key.
    pub prompt_bytes: u64,
    /// Of these, bytes the tree said the worker holds.
    pub matched_bytes: u64,
    /// Failed exchanges.
    pub failures: u64,
    /// 5xx answers other than 503.
    pub errors: u64,
    /// Good answers.
    pub successes: u64,
}

impl Totals {
    /// As the counters stand now.
    pub fn of_slot(cores: &[CoreShared], slot: Slot) -> Totals {
        let mut sum = Totals::default();
        for stats in cores
            .iter()
            .filter_map(|core| core.stats.workers.get(usize::from(slot.0)))
        {
            sum.add(Totals {
                chosen: stats.chosen.value(),
                prompt_bytes: stats.prompt_bytes.value(),
                matched_bytes: stats.matched_bytes.value(),
                failures: stats.failures.value(),
                errors: stats.errors.value(),
                successes: stats.successes.value(),
            });
        }
        sum
    }

    /// Adds another count.
    pub fn add(&mut self, other: Totals) {
        self.chosen += other.chosen;
        self.prompt_bytes += other.prompt_bytes;
        self.matched_bytes += other.matched_bytes;
        self.failures += other.failures;
        self.errors += other.errors;
        self.successes += other.successes;
    }

    /// What came on top of `base`.
    pub fn since(self, base: Totals) -> Totals {
        Totals {
            chosen: self.chosen.saturating_sub(base.chosen),
            prompt_bytes: self.prompt_bytes.saturating_sub(base.prompt_bytes),
            matched_bytes: self.matched_bytes.saturating_sub(base.matched_bytes),
            failures: self.failures.saturating_sub(base.failures),
            errors: self.errors.saturating_sub(base.errors),
            successes: self.successes.saturating_sub(base.successes),
        }
    }
}
