//! What chooses in a simulation: Corelane's own policies (the code in `route`), the gate it replaces, and the formulas of
//! other routers.

use std::sync::Arc;

use ahash::AHashMap;
use shards::{Books, Now, Pin, PrefixHash, Sessions, Slot, Tree};

use super::agenda::Ns;
use super::content::{Content, TOKEN_BYTES, mix};
use super::formula::{Facts, Formula, Kind};
use super::router::Beside;
use crate::route::{
    Candidates, Decision, Found, Home, Key, Loads, PolicyKind, Prefixes, Role, Sample, Settings,
    TreePrefixes, Turn, bytes_of_blocks, decide, home_for_new,
};

/// The policy that stands in the simulator alone.
pub const FLEET_GATE: &str = "cache_aware_fleet_gate";
/// The policy that does what a live router did.
pub const AS_LOGGED: &str = "as_logged";
/// The policy that learns waits.
pub const EXPECTED_WAIT: &str = "expected_wait";

/// Sessions that `sticky_least_loaded` can bind.
const SESSION_COUNT: usize = 1 << 16;
/// Tokens that `prefix_hash` looks at.
const HASHED_TOKENS: u32 = 256;

/// A request, as policies see it.
pub struct Question<'a> {
    /// Its prompt.
    pub content: &'a Content,
    /// Its session.
    pub session: u64,
    /// When.
    pub now: Ns,
    /// The prompt's chain; empty under a policy that does not look at it.
    pub chain: &'a [PrefixHash],
    /// Who holds what.
    pub tree: Option<&'a Tree>,
    /// For which leg.
    pub role: Role,
}

/// A worker, and what is booked with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Which.
    pub slot: Slot,
    /// Its load then.
    pub seen: u32,
    /// Why, for those that say so.
    pub reason: &'static str,
    /// Tokens of the prompt it is thought to hold.
    pub matched_tokens: u64,
    /// Bytes to compute and requests before its first byte, itself counted.
    pub ahead: (u64, u32),
    /// Bytes to compute of its own.
    pub own_bytes: u64,
    /// Answers under way.
    pub streams: u32,
}

/// A policy with its state.
pub enum Policy {
    /// One of `route`'s.
    Ours(Box<Ours>),
    /// vllm-router 0.1.17: the spread of the whole fleet's load switches affinity off for everybody.
    FleetGate(Box<Ours>),
    /// Another router's.
    Formula(Box<Formula>),
    /// Whom a live router chose, for a pool.
    Logged(Arc<Logged>, usize),
}

/// Who was chosen for each request, by pool: by the name of its prompt's end, which is its own.
#[derive(Debug, Default)]
pub struct Logged(pub AHashMap<u64, [Option<Slot>; 2]>);

/// What `route`'s policies need.
pub struct Ours {
    settings: Settings,
    turn: Turn,
    scratch: Vec<Slot>,
    sessions: Option<Sessions>,
}

/// Names of all policies.
pub fn names() -> impl Iterator<Item = &'static str> {
    let ours = PolicyKind::ALL
        .into_iter()
        .filter(|kind| *kind != PolicyKind::KvAware);
    let ours = ours.map(PolicyKind::name);
    let others = Kind::ALL.into_iter().map(Kind::name);
    [FLEET_GATE].into_iter().chain(ours).chain(others)
}

impl Policy {
    /// The policy of that name, with these thresholds. `None`: there is none.
    pub fn parse(name: &str, settings: &Settings, seed: u64) -> Option<Policy> {
        let ours = |policy| {
            let is_sticky = policy == PolicyKind::StickyLeastLoaded;
            Box::new(Ours {
                settings: Settings {
                    policy,
                    ..*settings
                },
                turn: Turn::new(seed),
                scratch: Vec::new(),
                sessions: is_sticky.then(|| Sessions::new(SESSION_COUNT)),
            })
        };
        if let Some(kind) = Kind::ALL.into_iter().find(|kind| kind.name() == name) {
            return Some(Policy::Formula(Box::new(Formula::new(kind, seed))));
        }
        match name {
            FLEET_GATE => Some(Policy::FleetGate(ours(PolicyKind::CacheAware))),
            _ => PolicyKind::parse(name)
                .filter(|kind| *kind != PolicyKind::KvAware)
                .map(|kind| Policy::Ours(ours(kind))),
        }
    }

    /// Whether it looks at prefixes.
    pub fn uses_tree(&self) -> bool {
        match self {
            Policy::Ours(ours) => ours.settings.policy.uses_tree(),
            Policy::FleetGate(_) => true,
            Policy::Formula(formula) => formula.kind().uses_tree(),
            Policy::Logged(..) => false,
        }
    }

    /// Whether the books count what is to be computed instead of the whole prompt.
    pub fn books_fresh(&self) -> bool {
        matches!(self, Policy::Ours(ours) if ours.settings.policy == PolicyKind::ExpectedWait)
    }

    /// Chooses among the candidates.
    pub fn choose(
        &mut self,
        question: &Question<'_>,
        pin: &Pin<'_>,
        candidates: &Candidates,
        books: &Arc<Books>,
        beside: &dyn Fn(Slot) -> Beside,
    ) -> Option<Choice> {
        let books: &Books = books;
        let length = question.content.bytes();
        let prefixes = question.tree.map(|tree| TreePrefixes {
            tree,
            pin,
            chain: question.chain,
        });
        let prefixes = prefixes.as_ref().filter(|_| length > 0);
        let decision = match self {
            Policy::Ours(ours) => ours.choose(question, prefixes, candidates, books),
            Policy::FleetGate(ours) => ours.fleet_gate(prefixes?, length, candidates, books),
            Policy::Logged(logged, pool) => {
                let known = logged.0.get(&question.content.last_name());
                let slot = known.and_then(|slots| slots[*pool]);
                let slot = slot.filter(|slot| candidates.contains(*slot));
                // A request that nobody of this pool got then: whoever has least.
                let least = || {
                    candidates
                        .slots()
                        .iter()
                        .min_by_key(|slot| books.in_flight(**slot))
                };
                let slot = slot.or_else(|| least().copied())?;
                return Some(Choice {
                    slot,
                    seen: books.in_flight(slot),
                    reason: AS_LOGGED,
                    matched_tokens: 0,
                    ahead: (0, 0),
                    own_bytes: 0,
                    streams: 0,
                });
            }
            Policy::Formula(formula) => {
                let tokens = u64::from(question.content.tokens());
                let facts = facts(question, pin, candidates, books, beside);
                let index = formula.choose(&facts, tokens, question.session, question.now)?;
                let chosen = facts[index];
                return Some(Choice {
                    slot: Slot(chosen.slot),
                    seen: chosen.load,
                    reason: formula.kind().name(),
                    matched_tokens: chosen.hit_tokens,
                    ahead: (0, 0),
                    own_bytes: 0,
                    streams: 0,
                });
            }
        }?;
        let matched = bytes_of_blocks(decision.matched_blocks);
        let fresh = length.saturating_sub(matched);
        Some(Choice {
            slot: decision.slot,
            seen: decision.seen,
            reason: decision.reason.label(),
            matched_tokens: matched / TOKEN_BYTES,
            ahead: (
                books.waiting_bytes(decision.slot) + fresh,
                books.waiting(decision.slot) + 1,
            ),
            own_bytes: fresh,
            streams: books.load(decision.slot).active,
        })
    }

    /// A first byte came after so many seconds.
    pub fn learn(&mut self, choice: &Choice, seconds: f64) {
        if self.books_fresh()
            && let Policy::Ours(ours) = self
        {
            let (bytes, requests) = choice.ahead;
            ours.turn.waits.observe(
                choice.slot,
                Sample {
                    bytes,
                    requests,
                    own_bytes: choice.own_bytes,
                    streams: choice.streams,
                    seconds,
                },
            );
        }
    }

    /// Another incarnation stands in this slot.
    pub fn forget(&mut self, slot: Slot) {
        match self {
            Policy::Ours(ours) => ours.turn.waits.forget(slot),
            Policy::Formula(formula) => formula.forget(slot),
            Policy::FleetGate(_) | Policy::Logged(..) => {}
        }
    }
}

impl Ours {
    fn choose(
        &mut self,
        question: &Question<'_>,
        prefixes: Option<&TreePrefixes<'_>>,
        candidates: &Candidates,
        books: &Books,
    ) -> Option<Decision> {
        let key = match self.settings.policy {
            policy if policy.uses_tree() => {
                let length = question.content.bytes();
                prefixes.map_or(Key::None, |prefixes| Key::Prefix(prefixes, length))
            }
            PolicyKind::StickyLeastLoaded => {
                let home = self.home(question, candidates, books)?;
                Key::Session(question.session, home)
            }
            PolicyKind::PrefixHash => {
                let mut begin = question.content.clone();
                begin.truncate(HASHED_TOKENS);
                let blocks = begin.blocks(begin.tokens().max(1), 0);
                Key::Hash(blocks.first().copied().unwrap_or(0))
            }
            _ => Key::Hash(mix(question.session, 7)),
        };
        decide(
            &self.settings,
            key,
            candidates,
            &[],
            books,
            &mut self.turn,
            &mut self.scratch,
        )
    }

    fn home(
        &mut self,
        question: &Question<'_>,
        candidates: &Candidates,
        books: &Books,
    ) -> Option<Home> {
        let sessions = self.sessions.as_ref()?;
        let now = Now {
            secs: (question.now / 1_000_000_000) as u32 + 1,
            ttl_secs: 7200,
        };
        let key = mix(question.session, question.role as u64).max(1);
        let bound = sessions.find(key, now);
        if let Some(slot) = bound.filter(|slot| candidates.contains(*slot)) {
            return Some(Home {
                slot,
                is_new: false,
            });
        }
        let rng = &mut self.turn.rng;
        let wanted = home_for_new(candidates, sessions, books, |_| true, rng)?;
        let slot = sessions.bind(key, wanted, bound, now);
        Some(Home { slot, is_new: true })
    }

    /// vllm-router 0.1.17: when the most and the least loaded are far apart, the least loaded gets everything; else the
    /// longest match above the threshold, else the least loaded.
    fn fleet_gate(
        &mut self,
        prefixes: &TreePrefixes<'_>,
        length_bytes: u64,
        candidates: &Candidates,
        books: &Books,
    ) -> Option<Decision> {
        let loads = candidates.slots().iter().map(|slot| books.in_flight(*slot));
        let (most, least) = (loads.clone().max()?, loads.min()?);
        let is_imbalanced = most - least > self.settings.balance_abs_threshold
            && f64::from(most) > self.settings.balance_rel_threshold * f64::from(least);
        let found = prefixes.find(|slot| candidates.contains(slot));
        let found = found.filter(|found| {
            let share = bytes_of_blocks(found.blocks()) as f64 / length_bytes as f64;
            !is_imbalanced && share > self.settings.cache_threshold
        });
        let settings = Settings {
            policy: PolicyKind::LeastLoaded,
            ..self.settings
        };
        let Some(found) = found else {
            let key: Key<'_, TreePrefixes<'_>> = Key::None;
            let (turn, scratch) = (&mut self.turn, &mut self.scratch);
            return decide(&settings, key, candidates, &[], books, turn, scratch);
        };
        let holders: Candidates = found
            .holders()
            .filter(|slot| candidates.contains(*slot))
            .collect();
        let key: Key<'_, TreePrefixes<'_>> = Key::None;
        let (turn, scratch) = (&mut self.turn, &mut self.scratch);
        let decision = decide(&settings, key, &holders, &[], books, turn, scratch)?;
        Some(Decision {
            matched_blocks: found.blocks(),
            ..decision
        })
    }
}

fn facts(
    question: &Question<'_>,
    pin: &Pin<'_>,
    candidates: &Candidates,
    books: &Books,
    beside: &dyn Fn(Slot) -> Beside,
) -> Vec<Facts> {
    let mut matches = Vec::new();
    if let Some(tree) = question.tree {
        let (chain, count) = (question.chain, candidates.len());
        tree.matches(
            pin,
            chain,
            |slot| candidates.contains(slot),
            count,
            &mut matches,
        );
    }
    let fact = |slot: &Slot| {
        let found = matches.iter().find(|(holder, _)| holder == slot);
        let blocks = found.map_or(0, |(_, blocks)| *blocks);
        Facts {
            slot: slot.0,
            load: books.in_flight(*slot),
            hit_tokens: bytes_of_blocks(blocks) / TOKEN_BYTES,
            beside: beside(*slot),
        }
    };
    candidates.slots().iter().map(fact).collect()
}
