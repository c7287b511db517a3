//! What is told of requests in two legs, and of the workers of each role. Summaries of vllm-router's are histograms here: several
//! routers' add up.

use std::fmt;

use super::families::{Families, Label};
use super::{Scrape, WorkerView};
use crate::route::{Role, TOKEN_BYTES, Whole};
use crate::shared::{Outcome, PdStats, Route};

impl Scrape {
    /// What the cores count of requests in two legs.
    pub(super) fn pd(&self, out: &mut Families) -> fmt::Result {
        let sum = |read: fn(&PdStats) -> u64| self.sum(|stats| read(&stats.pd));
        let routes = || Route::ALL.into_iter().filter(|route| route.generates());
        out.counters(
            "vllm_router_pd_requests",
            "Requests that went in legs",
            routes().map(|route| {
                let count = self.sum(|stats| stats.pd.requests[route as usize].value());
                ([("route", route.label().into())], count)
            }),
        )?;
        let first_bytes = routes().filter_map(|route| {
            let merged = self.merged(|stats| stats.pd.first_byte[route as usize].snapshot())?;
            Some(([("route", route.label().into())], merged))
        });
        out.histograms(
            "vllm_router_pd_request_duration_seconds",
            "From the last byte of a request that went in legs to the first of its answer",
            first_bytes.filter(|(_, snapshot)| snapshot.count > 0),
        )?;
        let no_seat = routes().map(|route| self.exchanges(route, Outcome::NoWorker));
        out.counters(
            "vllm_router_pd_errors",
            "Requests for which no worker of one of the roles was there",
            std::iter::once((
                [("error_type", "server_selection".into())],
                no_seat.sum::<u64>(),
            )),
        )?;
        let too_long = [
            ("request", sum(|pd| pd.requests_too_long.value())),
            ("prefill", sum(|pd| pd.answers_too_long.value())),
        ];
        out.counters(
            "vllm_router_pd_body_over_limit",
            "Bodies that were too long: of requests (413), of prefill workers' answers (the request goes elsewhere)",
            too_long
                .into_iter()
                .map(|(stage, count)| ([("stage", stage.into())], count)),
        )?;
        out.counter(
            "vllm_router_pd_missing_kv_transfer_params",
            "Prefill answers without transfer parameters",
            sum(|pd| pd.missing_transfer.value()),
        )?;
        out.counter(
            "vllm_router_pd_handovers",
            "Prefill legs that ended with transfer parameters",
            sum(|pd| pd.handovers.value()),
        )?;
        // Ends first: an orphan that ends between the reads is then no negative number.
        let released = sum(|pd| pd.orphans_released.value());
        let lost = sum(|pd| pd.orphans_lost.value());
        let orphans = sum(|pd| pd.orphans.value());
        out.counters(
            "vllm_router_pd_orphaned_handovers",
            "Hand-overs that no decode worker got, by what became of their blocks",
            [("released", released), ("lost", lost)]
                .into_iter()
                .map(|(outcome, count)| ([("outcome", outcome.into())], count)),
        )?;
        out.gauge(
            "vllm_router_pd_orphaned_handovers_in_flight",
            "Hand-overs whose blocks are being released",
            orphans.saturating_sub(released).saturating_sub(lost),
        )?;
        let cores = self.0.shared.cores.iter();
        let oldest_ns = cores.map(|core| core.stats.pd.oldest_orphan_ns.value());
        out.seconds(
            "vllm_router_pd_orphaned_handover_oldest_seconds",
            "Age of the oldest of them; 0: none",
            oldest_ns.max().unwrap_or(0),
        )?;
        out.counter(
            "vllm_router_pd_skipped_prefill",
            "Requests without a prefill leg because decode lacked too little",
            sum(|pd| pd.skipped_prefill.value()),
        )?;
        out.counter(
            "vllm_router_pd_stale_handovers",
            "Hand-overs too old to be used, or of a prefill worker that restarted",
            sum(|pd| pd.stale_handovers.value()),
        )?;
        out.counters(
            "vllm_router_pd_whole_requests",
            "Requests sent whole to a decode worker, by reason",
            Whole::ALL.into_iter().map(|why| {
                let count = self.sum(|stats| stats.pd.whole[why as usize].value());
                ([("reason", why.label().into())], count)
            }),
        )?;
        out.counter(
            "vllm_router_pd_usage_fixed",
            "Answers whose usage was put right with that of prefill",
            sum(|pd| pd.usage_fixed.value()),
        )?;
        out.histogram(
            "vllm_router_pd_handover_gap_seconds",
            "From the end of prefill to the dispatch of decode",
            self.merged(|stats| stats.pd.handover_gap.snapshot())
                .as_ref(),
        )?;
        out.histogram(
            "vllm_router_pd_decode_pending_seconds",
            "From when decode's seat is taken to the dispatch of decode",
            self.merged(|stats| stats.pd.decode_pending.snapshot())
                .as_ref(),
        )
    }

    /// vllm-router's families of one role's workers.
    pub(super) fn pd_workers(&self, out: &mut Families, workers: &[WorkerView]) -> fmt::Result {
        let of = |role: Role, read: fn(&WorkerView) -> u64| {
            let workers = workers.iter().filter(move |worker| worker.role == role);
            workers.map(move |worker| {
                (
                    [("worker", Label::Shared(worker.url.clone()))],
                    read(worker),
                )
            })
        };
        out.counters(
            "vllm_router_pd_prefill_requests",
            "Times the prefill worker was chosen",
            of(Role::Prefill, |w| w.chosen),
        )?;
        out.counters(
            "vllm_router_pd_decode_requests",
            "Times the decode worker was chosen",
            of(Role::Decode, |w| w.chosen),
        )?;
        out.counters(
            "vllm_router_pd_prefill_errors",
            "Exchanges that failed with the prefill worker",
            of(Role::Prefill, |w| w.failures),
        )?;
        out.counters(
            "vllm_router_pd_decode_errors",
            "Exchanges that failed with the decode worker",
            of(Role::Decode, |w| w.failures),
        )?;
        let books = &self.0.shared.books;
        out.gauges(
            "vllm_router_pd_prefill_occupancy",
            "Prefill legs in flight",
            by_rank(workers, Role::Prefill, |w| w.in_flight.into()),
        )?;
        out.gauges(
            "vllm_router_pd_active_prefill_tokens",
            "Tokens that these have to compute, as far as kv_aware knows; else a quarter of their prompts' bytes",
            by_rank(workers, Role::Prefill, |w| {
                let load = books.load(w.id.slot);
                (load.waiting_bytes + load.active_bytes) / TOKEN_BYTES as u64
            }),
        )?;
        out.gauges(
            "vllm_router_pd_unknown_prefill_requests",
            "Prefill legs that stand in no worker's backlog: none, as their bytes count where their tokens are not known",
            by_rank(workers, Role::Prefill, |_| 0),
        )?;
        out.gauges(
            "vllm_router_pd_pending_decode_requests",
            "Decode legs not dispatched yet",
            by_rank(workers, Role::Decode, |w| w.waiting.into()),
        )?;
        out.gauges(
            "vllm_router_pd_active_decode_requests",
            "Decode legs dispatched and not ended",
            by_rank(workers, Role::Decode, |w| w.active.into()),
        )
    }
}

/// A number of each worker of a role, by URL and rank.
fn by_rank(
    workers: &[WorkerView],
    role: Role,
    read: impl Fn(&WorkerView) -> u64,
) -> impl Iterator<Item = ([(&'static str, Label); 2], u64)> {
    let workers = workers.iter().filter(move |worker| worker.role == role);
    workers.map(move |worker| {
        let rank = worker.rank.map_or("aggregate".into(), Label::number);
        let labels = [
            ("worker", Label::Shared(worker.url.clone())),
            ("rank", rank),
        ];
        (labels, read(worker))
    })
}
