//! One loom model per invariant of the `shards` crate: `cargo loom` (or `.ci/loom`, which also proves that they ran).
//!
//! A model runs its closure once for every interleaving, and every value that a load may see, up to a number of
//! preemptions: 2, or what `LOOM_MAX_PREEMPTIONS` says. Under `cfg(loom)` a segment of the tree has four buckets of one
//! entry, a directory two entries, and freed memory is kept, so that a late use is reported.

#[cfg(all(feature = "models", not(loom)))]
compile_error!(
    "cfg(loom) did not arrive: RUSTFLAGS in the environment overrides the alias's flags; unset it"
);

#[cfg(all(loom, test))]
mod models {
    mod addresses_keep_their_limit;
    mod bucket_holds_so_many;
    mod canary;
    mod doorbell_loses_no_wake_up;
    mod epoch_frees_nothing_in_use;
    mod find_under_clear_and_purge;
    mod find_under_eviction;
    mod find_under_insert;
    mod find_under_moves;
    mod find_under_removal;
    mod find_under_set_replacement;
    mod find_under_split;
    mod forest;
    mod gate_lets_in_the_next;
    mod guard_counts_exactly;
    mod guard_ends_once;
    mod guard_seat_is_taken_once;
    mod incarnations_stay_apart;
    mod mailbox_keeps_order;
    mod publish_gives_whole_values;
    mod sessions_agree;
    mod trace;

    /// Checks a model with a preemption bound of 2 unless the environment says otherwise.
    fn model(check: impl Fn() + Sync + Send + 'static) {
        model_up_to(2, check);
    }

    /// Checks a model that needs another bound to see what it is made for.
    fn model_up_to(preemptions_max: usize, check: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        let asked = builder.preemption_bound.unwrap_or(0);
        builder.preemption_bound = Some(asked.max(preemptions_max));
        builder.max_branches = 20_000;
        builder.check(check);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    /// Says where the models are. They need another build of `shards`, so a plain `cargo test` cannot run them.
    #[test]
    fn models_run_with_cargo_loom() {
        println!("the models run with `cargo loom`");
    }
}
