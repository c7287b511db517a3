//! What is told of `kv_aware`: what engines say they hold, and what was known of prompts.

use std::fmt;

use shards::Counter;

use super::families::{Families, Label};
use super::{Scrape, WorkerView};
use crate::control::kv::SourceView;
use crate::route::{PolicyKind, Reason, Role, Trust};
use crate::shared::{Affinity, KvStats};

/// A counter of a worker's events: name, help, and where it is read.
type Told = (&'static str, &'static str, fn(&SourceView) -> u64);

/// Whether a source tells of this worker, or of all ranks of its engine.
fn is_of(source: &SourceView, worker: &WorkerView) -> bool {
    let rest = worker.url.strip_prefix(&*source.worker);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('@'))
}

impl Scrape {
    /// What engines say they hold; nothing without `kv_aware`.
    pub(super) fn kv(&self, out: &mut Families, workers: &[WorkerView]) -> fmt::Result {
        let Some(kv) = &self.0.shared.kv else {
            return Ok(());
        };
        let tree = &kv.index.tree;
        let (bytes, held) = (tree.bytes() as u64, tree.membership_count() as u64);
        let views = self.0.kv.views();
        let names: usize = views.iter().map(|view| view.name_bytes).sum();
        out.gauge(
            "corelane_kv_index_bytes",
            "Memory of the exact index",
            bytes,
        )?;
        out.gauge(
            "corelane_kv_names_bytes",
            "Memory of the engines' names for blocks",
            names as u64,
        )?;
        out.gauge(
            "corelane_kv_index_memberships",
            "Pairs of a KV block and a source that holds it",
            held,
        )?;
        out.counter(
            "corelane_kv_index_evicted",
            "KV blocks forgotten for room (--kv-index-bytes)",
            tree.evicted_count(),
        )?;
        out.counter(
            "corelane_kv_lessons",
            "Batches of KV blocks sent to the cores",
            self.0.kv.lesson_count(),
        )?;
        // By worker: the labels of ranks would be as many as the fleet's GPUs.
        let mut sources: Vec<SourceView> = Vec::new();
        for view in views {
            match sources.iter_mut().find(|sum| sum.worker == view.worker) {
                Some(sum) => sum.add(&view),
                None => sources.push(view),
            }
        }
        let each = |read: fn(&SourceView) -> u64| {
            let each = sources.iter();
            each.map(move |view| ([("worker", Label::Shared(view.worker.clone()))], read(view)))
        };
        out.gauges(
            "corelane_kv_trust",
            "How far a worker's events are believed: 0 blind, 1 degraded, 2 catching up, 3 exact",
            each(|view| view.trust as u64),
        )?;
        out.gauges(
            "corelane_kv_blocks",
            "KV blocks that a worker says it holds",
            each(|view| view.block_count as u64),
        )?;
        let counters: [Told; 7] = [
            ("corelane_kv_stored", "KV blocks stored", |v| {
                v.counts.stored
            }),
            ("corelane_kv_removed", "KV blocks removed", |v| {
                v.counts.removed
            }),
            (
                "corelane_kv_passed_over",
                "KV blocks without a known parent, or of another size or cache group",
                |v| v.counts.passed_over,
            ),
            (
                "corelane_kv_bad_events",
                "Events and messages that make no sense",
                |v| v.counts.bad,
            ),
            ("corelane_kv_gaps", "Gaps in a worker's events", |v| v.gaps),
            (
                "corelane_kv_replays",
                "Replays that gave all that was missing",
                |v| v.replays,
            ),
            (
                "corelane_kv_restarts",
                "Times a worker's publisher has begun anew",
                |v| v.restarts,
            ),
        ];
        for (name, help, read) in counters {
            out.counters(name, help, each(read))?;
        }
        out.gauges(
            "vllm_router_pd_identity_verified",
            "1: what the worker holds is known exactly (corelane_kv_trust 3)",
            workers.iter().map(|worker| {
                let sources = sources.iter();
                let mut own = sources.filter(|source| is_of(source, worker)).peekable();
                let is_exact =
                    own.peek().is_some() && own.all(|source| source.trust == Trust::Exact);
                let label = [("worker", Label::Shared(worker.url.clone()))];
                (label, u64::from(is_exact))
            }),
        )?;
        self.placements(out)?;
        self.tokens(out)
    }

    /// What was known of prompts when they were placed, in vllm-router's words.
    fn placements(&self, out: &mut Families) -> fmt::Result {
        let config = self.0.shared.config();
        let roles = || config.needed_roles().iter().copied();
        let placing = || {
            roles().filter(|role| {
                *role != Role::Decode && config.settings_of(*role).policy == PolicyKind::KvAware
            })
        };
        let total = |read: fn(&KvStats) -> &[Counter; 3]| -> u64 {
            let each = placing().map(|role| self.sum(|s| read(&s.kv)[role as usize].value()));
            each.sum()
        };
        let ids = total(|kv| &kv.of_ids);
        let text = total(|kv| &kv.of_text);
        let without = total(|kv| &kv.without);
        let mut inputs = vec![("token_ids", ids), ("render", text)];
        match &self.0.shared.desk {
            None => inputs.push(("render_unavailable", without)),
            Some(desk) => {
                let mut untold = without;
                for (fate, count) in desk.fates() {
                    let Some(result) = fate.routing_input() else {
                        continue;
                    };
                    untold = untold.saturating_sub(count);
                    match inputs.iter_mut().find(|(known, _)| *known == result) {
                        Some((_, sum)) => *sum += count,
                        None => inputs.push((result, count)),
                    }
                }
                inputs.push(("unsupported_route", untold));
            }
        }
        out.counters(
            "vllm_router_kv_routing_inputs",
            "Prompts that kv_aware placed, by where their tokens came from, or why there were none",
            inputs.into_iter().map(|(result, count)| {
                (
                    [("transport", "http".into()), ("result", result.into())],
                    count,
                )
            }),
        )?;
        let lookups = [
            (
                "hit",
                self.reasons(|reason| reason == Reason::LeastCostWarm),
            ),
            (
                "miss",
                self.reasons(|reason| reason == Reason::LeastCostCold),
            ),
            ("unavailable", without),
        ];
        out.counters(
            "vllm_router_kv_placement_lookups",
            "Prompts that kv_aware placed: with a worker that holds some of it, that holds none, or without tokens",
            lookups
                .into_iter()
                .map(|(result, count)| ([("result", result.into())], count)),
        )?;
        out.histogram(
            "vllm_router_pd_kv_prepare_seconds",
            "How long prompts of text waited for their tokens, those that got none among them",
            self.merged(|stats| stats.kv.token_wait.snapshot()).as_ref(),
        )?;
        let of = |role: Role, read: fn(&KvStats) -> &[Counter; 3]| {
            self.sum(|stats| read(&stats.kv)[role as usize].value())
        };
        for role in placing() {
            let [new, credited] = match role {
                Role::Prefill => [
                    "vllm_router_pd_new_prefill_tokens",
                    "vllm_router_pd_credited_prefix_tokens",
                ],
                _ => ["corelane_kv_new_tokens", "corelane_kv_credited_tokens"],
            };
            let tokens = self.merged(|stats| stats.kv.new_tokens[role as usize].snapshot());
            out.histogram_of_counts(
                new,
                "Tokens of a prompt that the chosen worker had to compute",
                tokens.as_ref(),
            )?;
            out.counter(
                credited,
                "Tokens of prompts that the chosen worker held",
                of(role, |kv| &kv.credited_tokens),
            )?;
            if role == Role::Prefill {
                let known = of(role, |kv| &kv.of_ids) + of(role, |kv| &kv.of_text);
                let counts = [
                    ("none", known),
                    ("unverified_placement", of(role, |kv| &kv.without)),
                ];
                out.counters(
                    "vllm_router_pd_prefill_decisions",
                    "Choices of a prefill worker: by tokens, or by the approximate tree",
                    counts
                        .into_iter()
                        .map(|(fallback, count)| ([("fallback", fallback.into())], count)),
                )?;
            }
        }
        if config.kv.session_affinity_ttl_secs.is_none() {
            return Ok(());
        }
        out.counters(
            "vllm_router_pd_affinity_decisions",
            "Choices under kv_aware with sessions kept to their workers, by what became of the session",
            roles().flat_map(|role| {
                Affinity::ALL.into_iter().map(move |outcome| {
                    let labels = [
                        ("stage", role.label().into()),
                        ("outcome", outcome.label().into()),
                    ];
                    let count = self
                        .sum(|stats| stats.kv.affinity[role as usize][outcome as usize].value());
                    (labels, count)
                })
            }),
        )
    }

    /// Prompts of text; nothing without a tokenizer.
    fn tokens(&self, out: &mut Families) -> fmt::Result {
        let Some(desk) = &self.0.shared.desk else {
            return Ok(());
        };
        let fates = desk.fates();
        out.counters(
            "corelane_tokenizer_prompts",
            "Prompts of text by what became of them (late: placed without tokens, which are then made all the same)",
            fates.map(|(fate, count)| ([("result", Label::Fixed(fate.label()))], count)),
        )?;
        let [made, remembered] = desk.tokens();
        out.counter(
            "corelane_tokenizer_tokens_made",
            "Tokens made of text",
            made,
        )?;
        out.counter(
            "corelane_tokenizer_tokens_remembered",
            "Tokens of messages seen before",
            remembered,
        )?;
        out.gauge(
            "corelane_tokenizer_waiting",
            "Prompts that wait for a tokenizer's thread",
            desk.waiting_count() as u64,
        )
    }
}
