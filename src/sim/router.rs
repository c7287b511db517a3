//! The router of a simulation: Corelane's own books, prefix tree and policies, with one core and a clock that is told.
//! What a request takes and gives back here it takes and gives back in `core::hands`.

use std::sync::Arc;

use shards::{
    Books, Domain, LoadGuard, PrefixHash, Reader, Shard, Slot, Tree, TreeLimits, WorkerId,
};

use super::content::TOKEN_BYTES;
use super::policy::{Choice, Policy, Question};
use crate::route::{self, Batches, Candidates};

/// Bytes of the prefix tree of a simulation.
const TREE_BYTES: usize = 1 << 30;

/// What is known of a worker beside the books: kept by the router of the other systems, for their formulas.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beside {
    /// Prompt tokens booked and not yet computed, less what was thought to be cached.
    pub prefill_tokens: u64,
    /// Prompt tokens of all requests it has.
    pub tokens: u64,
    /// Requests it has without a first byte.
    pub waiting: u32,
    /// Share of its KV cache that is pinned, 0 to 1, as a metrics scrape would say.
    pub kv_usage: f64,
    /// Prompt tokens a second it computes, as its operator measured it.
    pub prefill_tokens_per_s: f64,
}

/// A pool of workers of one role.
pub struct Pool {
    /// Whose load it is.
    pub ids: Vec<WorkerId>,
    /// Those who may get requests.
    pub candidates: Candidates,
    /// By the index of `ids`; slots of a pool follow each other.
    pub beside: Vec<Beside>,
    first: u16,
    policy: Policy,
}

impl Pool {
    /// The place of a slot in the pool.
    pub fn index(&self, slot: Slot) -> usize {
        usize::from(slot.0 - self.first)
    }

    fn admit(&mut self, is_out: impl Fn(usize) -> bool) {
        let slots = self.ids.iter().enumerate();
        let open = slots.filter(|(index, _)| !is_out(*index));
        let named = open.map(|(_, id)| (id.slot, route::name_of(&format!("http://{}", id.slot.0))));
        self.candidates = named.collect::<Candidates>().with_ring();
    }
}

/// A seat on a worker.
pub struct Seat {
    /// Whose.
    pub id: WorkerId,
    /// The count.
    guard: LoadGuard<Arc<Books>>,
    /// Tokens booked as to be computed.
    pub fresh_tokens: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// What the choice was made by.
    pub choice: Choice,
}

/// Books, tree and pools.
pub struct Router {
    /// The books.
    pub books: Arc<Books>,
    tree: Arc<Tree>,
    reader: Reader,
    shards: Vec<Shard>,
    batches: Batches,
    /// By role: regular or prefill first, then decode.
    pub pools: Vec<Pool>,
    chain: Vec<PrefixHash>,
}

impl Router {
    /// A router in front of pools of some size, each with its policy.
    pub fn new(pools: Vec<(usize, Policy)>) -> Router {
        let slot_count: usize = pools.iter().map(|(size, _)| size).sum();
        let books = Arc::new(Books::new(slot_count));
        let domain = Arc::new(Domain::new(1));
        let limits = TreeLimits {
            bytes_max: TREE_BYTES,
            slot_count_max: slot_count,
        };
        let (tree, shards) = shards::tree(1, Arc::clone(&domain), limits);
        let mut first = 0;
        let pools = pools.into_iter().map(|(size, policy)| {
            let slots = first..first + size as u16;
            let ids = slots.map(|slot| books.open(Slot(slot)).expect("a free slot"));
            let mut pool = Pool {
                ids: ids.collect(),
                candidates: Candidates::default(),
                beside: vec![Beside::default(); size],
                first,
                policy,
            };
            first += size as u16;
            pool.admit(|_| false);
            pool
        });
        Router {
            pools: pools.collect(),
            reader: domain.reader(0),
            batches: Batches::new(shards.len()),
            books,
            tree,
            shards,
            chain: Vec::new(),
        }
    }

    /// Chooses a worker of a pool and takes a seat on it; what the worker will hold is learnt at once. `tried`: the one to
    /// be tried with this request. `None`: nobody may get requests.
    pub fn take(
        &mut self,
        pool: usize,
        question: Question<'_>,
        tried: Option<usize>,
    ) -> Option<Seat> {
        let at = pool;
        let pool = &mut self.pools[at];
        self.chain.clear();
        if pool.policy.uses_tree() {
            question.content.chain(&mut self.chain);
        }
        let question = Question {
            chain: &self.chain,
            tree: Some(&self.tree),
            ..question
        };
        let pin = self.reader.pin();
        let Pool {
            candidates,
            beside,
            policy,
            first,
            ids,
            ..
        } = pool;
        let only: Candidates;
        let candidates = match tried {
            Some(index) => {
                only = [ids[index].slot].into_iter().collect();
                &only
            }
            None => &*candidates,
        };
        let choice = policy.choose(&question, &pin, candidates, &self.books, &|slot: Slot| {
            beside[usize::from(slot.0 - *first)]
        })?;
        let index = usize::from(choice.slot.0 - *first);
        let id = ids[index];
        let tokens = u64::from(question.content.tokens());
        let fresh_tokens = tokens - choice.matched_tokens.min(tokens);
        // As the router's exchange does: under a policy that weighs what is to be computed, that is what waits.
        let booked = if policy.books_fresh() {
            fresh_tokens
        } else {
            tokens
        };
        let bytes = booked * TOKEN_BYTES;
        let guard = LoadGuard::acquire_at(Arc::clone(&self.books), id, bytes, choice.seen);
        let guard = guard.expect("one core, so the load seen is the load");
        beside[index].prefill_tokens += fresh_tokens;
        beside[index].tokens += tokens;
        beside[index].waiting += 1;
        if !self.chain.is_empty() {
            let shards = &mut self.shards;
            let (tree, slot) = (&self.tree, choice.slot);
            route::lessons(
                tree,
                &pin,
                &self.chain,
                slot,
                &mut self.batches,
                Vec::new,
                |owner, lesson| {
                    shards[owner].apply(lesson);
                },
            );
        }
        drop(pin);
        for shard in &mut self.shards {
            while shard.work(1 << 16) {}
        }
        Some(Seat {
            id,
            guard,
            fresh_tokens,
            tokens,
            choice,
        })
    }

    /// Its prompt is computed (plain: its first byte is here; decode: it was dispatched).
    pub fn activate(&mut self, pool: usize, seat: &Seat, waited_s: f64) {
        seat.guard.activate();
        let pool = &mut self.pools[pool];
        let index = pool.index(seat.id.slot);
        let beside = &mut pool.beside[index];
        beside.prefill_tokens -= seat.fresh_tokens;
        beside.waiting -= 1;
        pool.policy.learn(&seat.choice, waited_s);
    }

    /// Whether one of these seats is on a worker of a pool.
    pub fn has_seat(&self, seats: &[Option<Seat>], pool: usize, worker: usize) -> bool {
        let seat = seats.get(pool).and_then(Option::as_ref);
        seat.is_some_and(|seat| self.pools[pool].index(seat.id.slot) == worker)
    }

    /// Gives a seat back.
    pub fn give_back(&mut self, pool: usize, seat: Seat, is_active: bool) {
        let pool = &mut self.pools[pool];
        let index = pool.index(seat.id.slot);
        let beside = &mut pool.beside[index];
        if !is_active {
            beside.prefill_tokens -= seat.fresh_tokens;
            beside.waiting -= 1;
        }
        beside.tokens -= seat.tokens;
        seat.guard.release();
    }

    /// A worker began anew: another incarnation, and nothing is known of it.
    pub fn restart(&mut self, pool: usize, index: usize) {
        let id = self.pools[pool].ids[index];
        assert!(self.books.close(id), "it was open");
        let opened = self.books.open(id.slot);
        self.pools[pool].ids[index] = opened.expect("its seats were given back");
        self.pools[pool].policy.forget(id.slot);
        for shard in &mut self.shards {
            shard.apply(shards::Lesson::Purge { worker: id.slot });
            while shard.work(1 << 16) {}
        }
    }

    /// Who of a pool may get no requests.
    pub fn shut_out(&mut self, pool: usize, is_out: impl Fn(usize) -> bool) {
        self.pools[pool].admit(is_out);
    }

    /// Requests in flight in a pool.
    pub fn in_flight(&self, pool: usize) -> u32 {
        let ids = self.pools[pool].ids.iter();
        ids.map(|id| self.books.in_flight(id.slot)).sum()
    }
}
