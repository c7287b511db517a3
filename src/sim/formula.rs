//! The choices of other routers, from their published formulas: what Corelane's are compared with. Pure; all of them get the
//! same facts, whatever their own router would have to poll or guess.
//!
//! | name | of | formula (less is better) |
//! |---|---|---|
//! | `dynamo` | NVIDIA Dynamo 1.6.1, `dynamo-kv-router`, default weights | max(0, (P + ISL) / B - overlap) + D |
//! | `lmetric` | LMetric; vllm-router 0.1.17 `kv_aware` | (new prefill + active prefill tokens) x (requests + 1) |
//! | `llmd_weighted` | llm-d inference scheduler, default scorers | more is better: 2 (1 - queue) + 2 (1 - kv) + 3 hit |
//! | `llmd_sticky` | llm-d, "sticky until saturated" (blog of 2026-08-17) | those with hit >= 0.8 and less than tau uncached tokens in flight, else all; then least uncached tokens in flight + own |
//! | `aibrix_prefix` | AIBrix gateway, `prefix-cache` | max - min > 8: least; else best match with load <= mean + deviation |
//! | `smg_drain` | SMG `least-load` | tokens queued / rate + 0.15 k / (1 - k) |
//! | `preble` | Preble E2 (arXiv 2407.00023) | cached >= rest: its worker; else least load of the last 3 min + eviction + own |
//! | `sticky_override` | session affinity with override | the session's worker, unless its tokens exceed twice the mean |
//!
//! B is the block size, D the blocks a worker's requests hold, this one counted, k the share of its KV cache in use.
//! Consistent hashing with bounded loads is Corelane's own `prefix_hash`, power of two its `power_of_two`.

use std::collections::{HashMap, VecDeque};

use ahash::RandomState;
use shards::Slot;

use super::agenda::{Ns, ns};
use super::router::Beside;
use crate::route::Rng;

/// Tokens of a block, as Dynamo counts.
const BLOCK_TOKENS: f64 = 64.0;
/// llm-d's "saturated": uncached tokens in flight (18 s of a peak rate of 15,926 tokens/s, its reference fleet).
const SATURATED_TOKENS: u64 = 286_720;
/// llm-d's share of a prompt from which on a worker counts as holding it.
const STICKY_HIT: f64 = 0.8;
/// AIBrix: difference of loads above which the fleet is out of balance.
const AIBRIX_SPREAD: u32 = 8;
/// SMG: weight of the KV cache's pressure, in seconds.
const SMG_KV_S: f64 = 0.15;
/// Preble's window.
const PREBLE_WINDOW_S: f64 = 180.0;

/// One worker, as a formula sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    /// Its slot.
    pub slot: u16,
    /// Requests in flight.
    pub load: u32,
    /// Tokens of this prompt that it is thought to hold.
    pub hit_tokens: u64,
    /// What its router's books hold beside.
    pub beside: Beside,
}

impl Facts {
    fn hit(&self, prompt_tokens: u64) -> f64 {
        self.hit_tokens as f64 / prompt_tokens.max(1) as f64
    }

    fn fresh(&self, prompt_tokens: u64) -> u64 {
        prompt_tokens.saturating_sub(self.hit_tokens)
    }
}

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the table above")]
pub enum Kind {
    Dynamo,
    Lmetric,
    LlmdWeighted,
    LlmdSticky,
    AibrixPrefix,
    SmgDrain,
    Preble,
    StickyOverride,
}

impl Kind {
    /// All.
    pub const ALL: [Kind; 8] = [
        Kind::Dynamo,
        Kind::Lmetric,
        Kind::LlmdWeighted,
        Kind::LlmdSticky,
        Kind::AibrixPrefix,
        Kind::SmgDrain,
        Kind::Preble,
        Kind::StickyOverride,
    ];

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Dynamo => "dynamo",
            Kind::Lmetric => "lmetric",
            Kind::LlmdWeighted => "llmd_weighted",
            Kind::LlmdSticky => "llmd_sticky",
            Kind::AibrixPrefix => "aibrix_prefix",
            Kind::SmgDrain => "smg_drain",
            Kind::Preble => "preble",
            Kind::StickyOverride => "sticky_override",
        }
    }

    /// Whether it asks who holds what.
    pub fn uses_tree(self) -> bool {
        !matches!(self, Kind::SmgDrain | Kind::StickyOverride)
    }
}

/// A formula with what it remembers.
pub struct Formula {
    kind: Kind,
    rng: Rng,
    /// Preble: (when, slot, tokens) of the last requests.
    window: VecDeque<(Ns, u16, u64)>,
    /// Slot of each session.
    homes: HashMap<u64, u16, RandomState>,
}

impl Formula {
    /// One that has seen nothing.
    pub fn new(kind: Kind, seed: u64) -> Formula {
        Formula {
            kind,
            rng: Rng::new(seed),
            window: VecDeque::new(),
            homes: HashMap::with_hasher(RandomState::with_seeds(1, 2, 3, 4)),
        }
    }

    /// Which it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Nothing that was sent to a slot counts any more.
    pub fn forget(&mut self, slot: Slot) {
        self.homes.retain(|_, home| *home != slot.0);
        self.window.retain(|(_, at, _)| *at != slot.0);
    }

    /// The index of the worker chosen. `None`: there is none.
    pub fn choose(
        &mut self,
        all: &[Facts],
        prompt_tokens: u64,
        session: u64,
        now: Ns,
    ) -> Option<usize> {
        let tokens = prompt_tokens;
        let every = |_: &Facts| true;
        match self.kind {
            Kind::Dynamo => self.least(all, every, |w| dynamo(w, tokens)),
            Kind::Lmetric => self.least(all, every, |w| {
                (w.fresh(tokens) + w.beside.prefill_tokens) as f64 * f64::from(w.load + 1)
            }),
            Kind::LlmdWeighted => {
                let queues = spread(all.iter().map(|w| f64::from(w.beside.waiting)));
                self.least(all, every, |w| {
                    let queue = 2.0 * (1.0 - queues(f64::from(w.beside.waiting)));
                    -(queue + 2.0 * (1.0 - w.beside.kv_usage) + 3.0 * w.hit(tokens))
                })
            }
            Kind::LlmdSticky => {
                let keeps = |w: &Facts| {
                    w.hit(tokens) >= STICKY_HIT && w.beside.prefill_tokens < SATURATED_TOKENS
                };
                let least = |w: &Facts| (w.beside.prefill_tokens + w.fresh(tokens)) as f64;
                let kept = self.least(all, keeps, least);
                kept.or_else(|| self.least(all, every, least))
            }
            Kind::AibrixPrefix => self.aibrix(all),
            Kind::SmgDrain => self.least(all, every, |w| {
                let rate = w.beside.prefill_tokens_per_s.max(1.0);
                let k = w.beside.kv_usage.min(0.999);
                (w.beside.prefill_tokens + tokens) as f64 / rate + SMG_KV_S * k / (1.0 - k)
            }),
            Kind::Preble => self.preble(all, tokens, now),
            Kind::StickyOverride => self.sticky(all, session),
        }
    }

    /// The least of those that `accept` takes; equals by lot.
    fn least(
        &mut self,
        all: &[Facts],
        accept: impl Fn(&Facts) -> bool,
        cost: impl Fn(&Facts) -> f64,
    ) -> Option<usize> {
        let (mut chosen, mut least, mut equals) = (None, f64::INFINITY, 0);
        for (index, worker) in all.iter().enumerate().filter(|(_, worker)| accept(worker)) {
            let cost = cost(worker);
            if cost < least {
                (chosen, least, equals) = (Some(index), cost, 1);
            } else if cost == least {
                equals += 1;
                if self.rng.below(equals) == 0 {
                    chosen = Some(index);
                }
            }
        }
        chosen
    }

    fn aibrix(&mut self, all: &[Facts]) -> Option<usize> {
        let loads = || all.iter().map(|w| w.load);
        let load = |w: &Facts| f64::from(w.load);
        if loads().max()? - loads().min()? > AIBRIX_SPREAD {
            return self.least(all, |_| true, load);
        }
        let count = all.len() as f64;
        let mean = loads().map(f64::from).sum::<f64>() / count;
        let variance = loads()
            .map(|load| (f64::from(load) - mean).powi(2))
            .sum::<f64>()
            / count;
        let limit = mean + variance.sqrt();
        let best = |w: &Facts| -(w.hit_tokens as f64) * 1e6 + load(w);
        let warm = self.least(all, |w| w.hit_tokens > 0 && load(w) <= limit, best);
        warm.or_else(|| self.least(all, |_| true, load))
    }

    fn preble(&mut self, all: &[Facts], tokens: u64, now: Ns) -> Option<usize> {
        while let Some((at, ..)) = self.window.front()
            && at + ns(PREBLE_WINDOW_S) < now
        {
            self.window.pop_front();
        }
        let warm = self.least(
            all,
            |w| w.hit_tokens >= w.fresh(tokens),
            |w| -(w.hit_tokens as f64) * 1e6 + f64::from(w.load),
        );
        let chosen = warm.or_else(|| {
            let mut window: HashMap<u16, u64, RandomState> =
                HashMap::with_hasher(RandomState::with_seeds(1, 2, 3, 4));
            for (_, slot, tokens) in &self.window {
                *window.entry(*slot).or_default() += tokens;
            }
            self.least(
                all,
                |_| true,
                |w| {
                    let load = window.get(&w.slot).copied().unwrap_or(0) as f64;
                    let fresh = w.fresh(tokens) as f64;
                    // What has to go for it is worth as much as it is large, and goes only where there is no room.
                    load + fresh * w.beside.kv_usage + fresh
                },
            )
        })?;
        let fresh = all[chosen].fresh(tokens);
        self.window.push_back((now, all[chosen].slot, fresh));
        Some(chosen)
    }

    fn sticky(&mut self, all: &[Facts], session: u64) -> Option<usize> {
        let mean = all.iter().map(|w| w.beside.tokens as f64).sum::<f64>() / all.len() as f64;
        let home = self.homes.get(&session).copied();
        let home = home.and_then(|slot| all.iter().position(|w| w.slot == slot));
        let kept = home.filter(|index| all[*index].beside.tokens as f64 <= 2.0 * mean);
        let chosen = kept.or_else(|| self.least(all, |_| true, |w| w.beside.tokens as f64))?;
        self.homes.insert(session, all[chosen].slot);
        Some(chosen)
    }
}

fn dynamo(worker: &Facts, tokens: u64) -> f64 {
    let raw = (worker.beside.prefill_tokens + tokens) as f64 / BLOCK_TOKENS;
    let held = (worker.beside.tokens + tokens) as f64 / BLOCK_TOKENS;
    (raw - worker.hit_tokens as f64 / BLOCK_TOKENS).max(0.0) + held
}

/// Values on a scale from the least (0) to the greatest (1); all 0 where they are equal.
fn spread(values: impl Iterator<Item = f64> + Clone) -> impl Fn(f64) -> f64 {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    let width = values.fold(f64::NEG_INFINITY, f64::max) - least;
    move |value| {
        if width > 0.0 {
            (value - least) / width
        } else {
            0.0
        }
    }
}

#[cfg(test)]
#[path = "formula_tests.rs"]
mod tests;
