//! The policies: filter, then choose, with a reason. Runs on the core that has the request; reads the books and the
//! tree, writes nothing but its core's own [`Turn`].
//!
//! No policy allocates once its scratch has grown, and none walks the candidates more than a few times. Loads move
//! while they are read; that is why a decision carries the load it saw (R3) and why nothing here relies on two reads
//! of one load being equal.

use shards::{Books, Load, Match, Pin, PrefixHash, Slot, TIER_COUNT, Tree};

use super::candidates::Candidates;
use super::hashed::{self, Home};
use super::key::bytes_of_blocks;
use super::kv_aware::{self, Race, Tokens};
use super::reason::Reason;
use super::wait::{self, Waits};

/// Which policy chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// The worker that holds the longest prefix, unless it is overloaded. The default.
    CacheAware,
    /// One after the other.
    RoundRobin,
    /// Any.
    Random,
    /// The less loaded of two.
    PowerOfTwo,
    /// The least loaded of all.
    LeastLoaded,
    /// The worker of the session, on a ring of 160 points a worker.
    ConsistentHash,
    /// The worker of the session, by weights.
    RendezvousHash,
    /// The worker of the prompt's first bytes, on the ring, with bounded loads (SMG's).
    PrefixHash,
    /// The worker that had the fewest sessions when this one began.
    StickyLeastLoaded,
    /// The worker on which the prompt costs least, by what engines say they hold.
    KvAware,
    /// The worker on which the prompt costs least waiting, by what was learnt of first bytes.
    ExpectedWait,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 11] = [
        PolicyKind::CacheAware,
        PolicyKind::RoundRobin,
        PolicyKind::Random,
        PolicyKind::PowerOfTwo,
        PolicyKind::LeastLoaded,
        PolicyKind::ConsistentHash,
        PolicyKind::RendezvousHash,
        PolicyKind::PrefixHash,
        PolicyKind::StickyLeastLoaded,
        PolicyKind::KvAware,
        PolicyKind::ExpectedWait,
    ];

    /// The word of `--policy` and of metrics; vllm-router's where it has one.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::CacheAware => "cache_aware",
            PolicyKind::RoundRobin => "round_robin",
            PolicyKind::Random => "random",
            PolicyKind::PowerOfTwo => "power_of_two",
            PolicyKind::LeastLoaded => "least_loaded",
            PolicyKind::ConsistentHash => "consistent_hash",
            PolicyKind::RendezvousHash => "rendezvous_hash",
            PolicyKind::PrefixHash => "prefix_hash",
            PolicyKind::StickyLeastLoaded => "sticky_least_loaded",
            PolicyKind::KvAware => "kv_aware",
            PolicyKind::ExpectedWait => "expected_wait",
        }
    }

    /// Whether it wants to know the prompt's place in the tree.
    pub fn uses_tree(self) -> bool {
        matches!(
            self,
            PolicyKind::CacheAware | PolicyKind::KvAware | PolicyKind::ExpectedWait
        )
    }

    /// Whether it wants to know the request's session.
    pub fn uses_session(self) -> bool {
        matches!(
            self,
            PolicyKind::ConsistentHash | PolicyKind::RendezvousHash | PolicyKind::StickyLeastLoaded
        )
    }

    /// Whether its candidates need a ring.
    pub fn uses_ring(self) -> bool {
        matches!(self, PolicyKind::ConsistentHash | PolicyKind::PrefixHash)
    }

    /// The policy of that name.
    pub fn parse(name: &str) -> Option<PolicyKind> {
        PolicyKind::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
    }
}

/// What the operator set.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Which policy.
    pub policy: PolicyKind,
    /// `--cache-threshold`: the share of the prompt (0 to 1) that a match has to exceed to count.
    pub cache_threshold: f64,
    /// `--balance-abs-threshold`: requests by which a load has to exceed the least one to be overload.
    pub balance_abs_threshold: u32,
    /// `--balance-rel-threshold`: how many times the least load it has to exceed, too.
    pub balance_rel_threshold: f64,
    /// `--common-prefix-threshold`: the share of the prompt that a match ending at a fork has to exceed to count as
    /// this prompt's own. 0: every match counts as its own.
    pub common_prefix_threshold: f64,
    /// `--hash-balance-factor`: how many times its even share of the requests a worker may have under `consistent_hash` and
    /// `rendezvous_hash`, at least 1; 0: any number.
    pub hash_balance_factor: f64,
    /// `--prefix-hash-load-factor`: the same under `prefix_hash`.
    pub prefix_hash_load_factor: f64,
    /// Bytes of a prompt that are hashed under `prefix_hash`: four for each of `--prefix-token-count`.
    pub prefix_hash_bytes: usize,
    /// `--router-temperature`: how far `kv_aware` strays from the least cost; 0: not at all.
    pub temperature: f64,
    /// What a block in each storage tier is worth to `kv_aware`, 0 to 1; the device's 1.
    pub tier_values: [f64; TIER_COUNT],
}

/// Bytes that a token is taken for, as in SMG's `prefix_hash` over text.
pub const TOKEN_BYTES: usize = 4;

impl Default for Settings {
    /// vllm-router's defaults (0.1.17), for `prefix_hash` SMG's; the common prefix's threshold is ours.
    fn default() -> Settings {
        Settings {
            policy: PolicyKind::CacheAware,
            cache_threshold: 0.3,
            balance_abs_threshold: 64,
            balance_rel_threshold: 1.5,
            common_prefix_threshold: 0.8,
            hash_balance_factor: 0.0,
            prefix_hash_load_factor: 1.25,
            prefix_hash_bytes: 256 * TOKEN_BYTES,
            temperature: 0.0,
            tier_values: [1.0, 0.8, 0.6, 0.3],
        }
    }
}

/// How many requests each worker has in flight, read at the moment of choice.
pub trait Loads {
    /// Requests in flight in a slot.
    fn load(&self, slot: Slot) -> u32;

    /// Prompt bytes of those in a slot that wait for their first byte.
    fn waiting_bytes(&self, _slot: Slot) -> u64 {
        0
    }

    /// How many these are.
    fn waiting(&self, _slot: Slot) -> u32 {
        0
    }

    /// All of it, read once.
    fn all(&self, slot: Slot) -> Load {
        Load {
            in_flight: self.load(slot),
            waiting: self.waiting(slot),
            active: self.load(slot).saturating_sub(self.waiting(slot)),
            waiting_bytes: self.waiting_bytes(slot),
            ..Load::default()
        }
    }
}

impl Loads for Books {
    #[inline]
    fn load(&self, slot: Slot) -> u32 {
        self.in_flight(slot)
    }

    #[inline]
    fn waiting_bytes(&self, slot: Slot) -> u64 {
        Books::waiting_bytes(self, slot)
    }

    fn waiting(&self, slot: Slot) -> u32 {
        Books::load(self, slot).waiting
    }

    fn all(&self, slot: Slot) -> Load {
        Books::load(self, slot)
    }
}

/// A longest match: the deepest block of a prompt that a taken worker holds.
pub trait Found {
    /// Blocks of the prompt from its start; at least one.
    fn blocks(&self) -> usize;
    /// Three or more different continuations of the last of these blocks are known.
    fn is_fork(&self) -> bool;
    /// Those who hold it, taken or not.
    fn holders(&self) -> impl Iterator<Item = Slot>;
    /// Whether a worker is one of them: cheap, where a prefix of the whole fleet has many holders to list.
    fn is_held_by(&self, slot: Slot) -> bool;
}

impl Found for Match<'_> {
    fn blocks(&self) -> usize {
        self.blocks
    }

    fn is_fork(&self) -> bool {
        Match::is_fork(self)
    }

    fn holders(&self) -> impl Iterator<Item = Slot> {
        Match::holders(self)
    }

    #[inline]
    fn is_held_by(&self, slot: Slot) -> bool {
        Match::is_held_by(self, slot)
    }
}

/// Who holds how much of one prompt.
pub trait Prefixes {
    /// What a look-up gives.
    type Found: Found;

    /// The deepest block that a worker holds which `accept` takes.
    fn find(&self, accept: impl FnMut(Slot) -> bool) -> Option<Self::Found>;
}

/// One prompt in the prefix tree.
pub struct TreePrefixes<'a> {
    /// The tree, read side.
    pub tree: &'a Tree,
    /// This core's pin of the tree's domain.
    pub pin: &'a Pin<'a>,
    /// The prompt's chain.
    pub chain: &'a [PrefixHash],
}

impl<'a> Prefixes for TreePrefixes<'a> {
    type Found = Match<'a>;

    fn find(&self, accept: impl FnMut(Slot) -> bool) -> Option<Match<'a>> {
        self.tree.find(self.pin, self.chain, accept)
    }
}

/// What a request is recognised by, as its policy wants it.
pub enum Key<'k, P> {
    /// Nothing: load decides.
    None,
    /// `cache_aware`, `expected_wait`: the prompt's place in the tree, and its length in bytes, as [`chain`](super::chain) gave it.
    Prefix(&'k P, u64),
    /// The policies that hash: of the session, or of the prompt's begin.
    Hash(u64),
    /// `sticky_least_loaded`: the session, and whose it is.
    Session(u64, Home),
    /// `kv_aware`: the prompt's tokens, and who holds them. Without, it wants `Prefix`, and chooses as `cache_aware` does.
    Tokens(Tokens<'k>),
}

impl<'k, P> Key<'k, P> {
    fn prefix(&self) -> Option<(&'k P, u64)> {
        match self {
            Key::Prefix(prefixes, length_bytes) => Some((prefixes, *length_bytes)),
            _ => None,
        }
    }
}

/// One core's own state of the policies.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Counts the choices of `round_robin`. Starts anywhere, so that cores do not march in step.
    pub round_robin: u64,
    /// For whatever is left to chance.
    pub rng: Rng,
    /// What `expected_wait` has learnt.
    pub waits: Waits,
    /// Scratch of `kv_aware`.
    pub(super) race: Race,
}

impl Turn {
    /// `seed` should differ from core to core.
    pub fn new(seed: u64) -> Turn {
        let mut rng = Rng::new(seed);
        Turn {
            round_robin: rng.next() >> 1,
            rng,
            waits: Waits::default(),
            race: Race::default(),
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014): one addition and two multiplications a number, any seed is good. Not for
/// secrets.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next number.
    #[allow(
        clippy::should_implement_trait,
        reason = "a generator has no end, an iterator may"
    )]
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`, uniform but for one part in 2^64 / limit. 0 when `limit` is 0.
    #[inline]
    pub fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }
}

/// A worker, and why it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The worker's slot.
    pub slot: Slot,
    /// Its load when it was chosen: reserve with `LoadGuard::acquire_at`, and decide again if it has changed.
    pub seen: u32,
    /// Why.
    pub reason: Reason,
    /// Blocks of the prompt that the look-up found this worker to hold. 0 also when it holds fewer than the match that
    /// was looked at.
    pub matched_blocks: usize,
    /// `kv_aware`: tokens that this worker has to compute, as far as is known.
    pub new_tokens: Option<u64>,
    /// Who it would have been but for its load.
    pub given_up: Option<Wanted>,
    /// The least load among those who could be chosen, if it was looked at.
    pub least_load: Option<u32>,
}

/// A worker that a policy wanted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its slot.
    pub slot: Slot,
    /// Its load.
    pub load: u32,
    /// Blocks of the prompt it holds.
    pub matched_blocks: usize,
}

/// Chooses a worker. `None`: every candidate has been tried, or there is none.
///
/// A `key` of another kind than the policy's counts as none. `exclude` are workers this request was on already. `scratch` is reused by the caller.
pub fn decide<P: Prefixes, L: Loads>(
    settings: &Settings,
    key: Key<'_, P>,
    candidates: &Candidates,
    exclude: &[Slot],
    loads: &L,
    turn: &mut Turn,
    scratch: &mut Vec<Slot>,
) -> Option<Decision> {
    let field = Entrants {
        candidates,
        exclude,
        loads,
    };
    let (chosen, reason) = match settings.policy {
        PolicyKind::CacheAware => {
            return cache_aware(settings, key.prefix(), &field, &mut turn.rng, scratch);
        }
        PolicyKind::KvAware => match key {
            Key::Tokens(tokens) => {
                return kv_aware::of_tokens(settings, tokens, &field, turn);
            }
            Key::Prefix(..) => {
                return cache_aware(settings, key.prefix(), &field, &mut turn.rng, scratch);
            }
            _ => (field.least_loaded(&mut turn.rng)?, Reason::NoKey),
        },
        PolicyKind::ExpectedWait => {
            let key = key.prefix();
            return match key.filter(|_| turn.waits.is_taught()) {
                Some((prefixes, length_bytes)) => {
                    wait::of_waits(prefixes, length_bytes, &field, turn)
                }
                None => cache_aware(settings, key, &field, &mut turn.rng, scratch),
            };
        }
        PolicyKind::ConsistentHash
        | PolicyKind::RendezvousHash
        | PolicyKind::PrefixHash
        | PolicyKind::StickyLeastLoaded => match key {
            Key::Hash(key) => return hashed::of_key(settings, key, &field),
            Key::Session(key, home) => return hashed::of_session(settings, key, home, &field),
            _ => (field.least_loaded(&mut turn.rng)?, Reason::NoKey),
        },
        PolicyKind::RoundRobin => (
            field.next_in_turn(&mut turn.round_robin)?,
            Reason::RoundRobin,
        ),
        PolicyKind::Random => (field.any(&mut turn.rng)?, Reason::Random),
        PolicyKind::PowerOfTwo => (field.better_of_two(&mut turn.rng)?, Reason::PowerOfTwo),
        PolicyKind::LeastLoaded => (field.least_loaded(&mut turn.rng)?, Reason::LeastLoaded),
    };
    Some(chosen.because(reason, 0))
}

/// The rule of vllm-project/router pull request 238, with one refinement.
///
/// It asks about this request's worker, not about the fleet: vllm-router 0.1.17 switches affinity off for everybody as
/// soon as any one worker is far above any other.
///
/// The refinement: a match that ends at a fork, where many prompts go on differently, is a system prompt and no
/// conversation. By the bare rule every new conversation would follow the one before it to the worker that saw the
/// system prompt first, for as long as that worker has fewer than 64 requests in flight, while the others stand idle;
/// the prefix itself is soon everywhere and cheap to prefill once more. So such a match counts as this prompt's own
/// only if it is nearly all of the prompt. Otherwise load decides, and who holds the prefix wins among equals.
fn cache_aware<P: Prefixes, L: Loads>(
    settings: &Settings,
    key: Option<(&P, u64)>,
    field: &Entrants<'_, L>,
    rng: &mut Rng,
    holders: &mut Vec<Slot>,
) -> Option<Decision> {
    let Some((prefixes, length_bytes)) = key else {
        return Some(field.least_loaded(rng)?.because(Reason::NoKey, 0));
    };
    match best_match(settings, prefixes, length_bytes, |slot| field.has(slot)) {
        Worth::Own(found) => {
            list(&found, |slot| field.has(slot), holders);
            match field.least_loaded_of(holders, rng) {
                // The owner of the shard has just taken the last of them away.
                None => Some(field.least_loaded(rng)?.because(Reason::Cold, 0)),
                Some(wanted) if !field.is_overloaded(settings, wanted.load) => {
                    Some(wanted.because(Reason::Affinity, found.blocks()))
                }
                Some(wanted) => {
                    let decision = shed(settings, prefixes, length_bytes, field, rng, holders)?;
                    Some(decision.instead_of(wanted, found.blocks()))
                }
            }
        }
        Worth::Common(found) => {
            field.least_loaded_holder_first(&found, Reason::SpreadCommonPrefix, rng)
        }
        Worth::Nothing => Some(field.least_loaded(rng)?.because(Reason::Cold, 0)),
    }
}

/// The worker wanted is overloaded: the longest match elsewhere, by the same measures.
fn shed<P: Prefixes, L: Loads>(
    settings: &Settings,
    prefixes: &P,
    length_bytes: u64,
    field: &Entrants<'_, L>,
    rng: &mut Rng,
    holders: &mut Vec<Slot>,
) -> Option<Decision> {
    let least = field.least_load();
    let may_take = |slot| field.has(slot) && !is_overload(settings, field.loads.load(slot), least);
    match best_match(settings, prefixes, length_bytes, may_take) {
        Worth::Own(found) => {
            list(&found, may_take, holders);
            if let Some(warm) = field.least_loaded_of(holders, rng) {
                return Some(Decision {
                    least_load: Some(least),
                    ..warm.because(Reason::ShedToWarm, found.blocks())
                });
            }
        }
        Worth::Common(found) => {
            return field.least_loaded_holder_first(&found, Reason::ShedToLeastLoaded, rng);
        }
        Worth::Nothing => {}
    }
    let least = field.least_loaded(rng)?;
    Some(least.because(Reason::ShedToLeastLoaded, 0))
}

/// What a match is worth to this prompt.
enum Worth<F> {
    Own(F),
    Common(F),
    Nothing,
}

/// The longest match among workers that `accept` takes.
fn best_match<P: Prefixes>(
    settings: &Settings,
    prefixes: &P,
    length_bytes: u64,
    accept: impl FnMut(Slot) -> bool,
) -> Worth<P::Found> {
    let Some(found) = prefixes.find(accept) else {
        return Worth::Nothing;
    };
    // Divided, not multiplied out: a quotient equal to the threshold then compares equal to it.
    let share = bytes_of_blocks(found.blocks()) as f64 / length_bytes as f64;
    if share <= settings.cache_threshold {
        Worth::Nothing
    } else if found.is_fork() && share <= settings.common_prefix_threshold {
        Worth::Common(found)
    } else {
        Worth::Own(found)
    }
}

/// The holders that `accept` takes.
fn list(found: &impl Found, accept: impl Fn(Slot) -> bool, holders: &mut Vec<Slot>) {
    holders.clear();
    holders.extend(found.holders().filter(|slot| accept(*slot)));
}

/// Both conditions, strictly, against the least load among the entrants (pull request 238).
#[inline]
fn is_overload(settings: &Settings, load: u32, least: u32) -> bool {
    load.saturating_sub(least) > settings.balance_abs_threshold
        && f64::from(load) > settings.balance_rel_threshold * f64::from(least)
}

/// A worker's lot in one choice: of equals the lowest wins.
#[inline]
pub(super) fn lot(draw: u64, slot: Slot) -> u64 {
    let mixed = (draw ^ u64::from(slot.0)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// The candidates less those already tried, with their loads (R1).
pub(super) struct Entrants<'a, L> {
    pub(super) candidates: &'a Candidates,
    pub(super) exclude: &'a [Slot],
    pub(super) loads: &'a L,
}

/// A worker with its load as read once.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub(super) slot: Slot,
    pub(super) load: u32,
}

impl Seen {
    pub(super) fn because(self, reason: Reason, matched_blocks: usize) -> Decision {
        Decision {
            slot: self.slot,
            seen: self.load,
            reason,
            matched_blocks,
            new_tokens: None,
            given_up: None,
            least_load: match reason {
                Reason::Cold
                | Reason::NoKey
                | Reason::LeastLoaded
                | Reason::SpreadCommonPrefix
                | Reason::ShedToLeastLoaded => Some(self.load),
                _ => None,
            },
        }
    }
}

impl Decision {
    /// Another one was wanted, and has too much to do.
    pub(super) fn instead_of(self, wanted: Seen, matched_blocks: usize) -> Decision {
        Decision {
            given_up: Some(Wanted {
                slot: wanted.slot,
                load: wanted.load,
                matched_blocks,
            }),
            ..self
        }
    }
}

impl<L: Loads> Entrants<'_, L> {
    #[inline]
    pub(super) fn has(&self, slot: Slot) -> bool {
        self.candidates.contains(slot) && !self.exclude.contains(&slot)
    }

    #[inline]
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.candidates
            .slots()
            .iter()
            .copied()
            .filter(|slot| !self.exclude.contains(slot))
    }

    #[inline]
    pub(super) fn see(&self, slot: Slot) -> Seen {
        Seen {
            slot,
            load: self.loads.load(slot),
        }
    }

    fn count(&self) -> usize {
        if self.exclude.is_empty() {
            self.candidates.len()
        } else {
            self.slots().count()
        }
    }

    /// The `index`-th entrant; cheap unless this is a retry.
    fn nth(&self, index: usize) -> Option<Seen> {
        let slot = match self.exclude {
            [] => self.candidates.slots().get(index).copied(),
            _ => self.slots().nth(index),
        };
        Some(self.see(slot?))
    }

    fn next_in_turn(&self, turn: &mut u64) -> Option<Seen> {
        let slots = self.candidates.slots();
        // Once round at most; the turn moves past those skipped, or the one after them would come twice.
        for _ in slots {
            let slot = slots[(*turn % slots.len() as u64) as usize];
            *turn = turn.wrapping_add(1);
            if !self.exclude.contains(&slot) {
                return Some(self.see(slot));
            }
        }
        None
    }

    fn any(&self, rng: &mut Rng) -> Option<Seen> {
        self.nth(rng.below(self.count()))
    }

    fn better_of_two(&self, rng: &mut Rng) -> Option<Seen> {
        let count = self.count();
        let first = rng.below(count);
        let one = self.nth(first)?;
        if count == 1 {
            return Some(one);
        }
        // Any of the others, each as likely.
        let second = rng.below(count - 1);
        let other = self.nth(second + usize::from(second >= first))?;
        // Equal loads: the first, which is as random as the second.
        Some(if other.load < one.load { other } else { one })
    }

    fn least_load(&self) -> u32 {
        match self.exclude {
            [] => self.least_load_of(self.candidates.slots()),
            _ => self
                .slots()
                .map(|slot| self.loads.load(slot))
                .min()
                .unwrap_or(0),
        }
    }

    /// Four minima side by side: one alone would wait for itself at every step.
    fn least_load_of(&self, slots: &[Slot]) -> u32 {
        let (fours, rest) = slots.as_chunks::<4>();
        let mut least = [u32::MAX; 4];
        for four in fours {
            for (least, slot) in least.iter_mut().zip(four) {
                *least = self.loads.load(*slot).min(*least);
            }
        }
        let least_of_rest = rest.iter().map(|slot| self.loads.load(*slot));
        least.into_iter().chain(least_of_rest).min().unwrap_or(0)
    }

    fn is_overloaded(&self, settings: &Settings, load: u32) -> bool {
        // A load that is not above the margin by itself cannot be above anybody by the margin: no pass over the fleet.
        load > settings.balance_abs_threshold && is_overload(settings, load, self.least_load())
    }

    fn least_loaded(&self, rng: &mut Rng) -> Option<Seen> {
        let least = self.least_load();
        let drawn = match self.exclude {
            [] => self.draw(
                self.candidates.slots().iter().copied(),
                least,
                |_| true,
                rng,
            ),
            _ => self.draw(self.slots(), least, |_| true, rng),
        };
        drawn.or_else(|| self.least_now())
    }

    fn least_loaded_of(&self, slots: &[Slot], rng: &mut Rng) -> Option<Seen> {
        let least = self.least_load_of(slots);
        self.draw(slots.iter().copied(), least, |_| true, rng)
            .or_else(|| {
                let seen = slots.iter().map(|slot| self.see(*slot));
                seen.min_by_key(|seen| seen.load)
            })
    }

    /// The least loaded; among equals one of those who hold what was found.
    fn least_loaded_holder_first(
        &self,
        found: &impl Found,
        reason: Reason,
        rng: &mut Rng,
    ) -> Option<Decision> {
        let least = self.least_load();
        let is_holder = |slot| found.is_held_by(slot);
        let chosen = match self.exclude {
            [] => self.draw(
                self.candidates.slots().iter().copied(),
                least,
                is_holder,
                rng,
            ),
            _ => self.draw(self.slots(), least, is_holder, rng),
        };
        let chosen = chosen.or_else(|| self.least_now())?;
        let blocks = if is_holder(chosen.slot) {
            found.blocks()
        } else {
            0
        };
        Some(chosen.because(reason, blocks))
    }

    /// One of those whose load is at most `least`; if any of them is preferred, one of these. All have the same chance
    /// (R2): every one gets a lot, anew for each choice, and the lowest wins. Lots cost a worker that is out of the
    /// question nothing, and a fleet that is all equal less than a random number for each would. `None`: the loads have
    /// grown since `least` was read.
    #[inline]
    fn draw(
        &self,
        slots: impl Iterator<Item = Slot>,
        least: u32,
        prefers: impl Fn(Slot) -> bool,
        rng: &mut Rng,
    ) -> Option<Seen> {
        let draw = rng.next();
        let lot_of = |slot| lot(draw, slot) >> 1 | u64::from(!prefers(slot)) << 63;
        // A plain loop: as `filter` and `min_by_key` it took five times as long.
        let (mut chosen, mut lowest) = (None, u64::MAX);
        for slot in slots {
            let seen = self.see(slot);
            if seen.load <= least {
                let lot = lot_of(slot);
                if lot <= lowest {
                    (chosen, lowest) = (Some(seen), lot);
                }
            }
        }
        chosen
    }

    /// For the rare case that the least loaded were taken by other cores while this one looked.
    #[cold]
    pub(super) fn least_now(&self) -> Option<Seen> {
        self.slots()
            .map(|slot| self.see(slot))
            .min_by_key(|seen| seen.load)
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
