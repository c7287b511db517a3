use std::collections::BTreeSet;
use std::sync::Arc;

use rmpv::Value;
use shards::{Domain, Shard, TreeLimits};

use super::*;
use crate::route::{KeySeed, Trust, block_chain};

const BLOCK: usize = 4;

struct Rig {
    index: Index,
    shards: Vec<Shard>,
    domain: Arc<Domain>,
    source: Source,
    out: Outbox,
}

impl Rig {
    fn new() -> Rig {
        let domain = Arc::new(Domain::new(1));
        let limits = TreeLimits {
            bytes_max: 1 << 20,
            slot_count_max: 64,
        };
        let (tree, shards) = shards::tree(2, domain.clone(), limits);
        let index = Index::new(tree, KeySeed(1), BLOCK);
        index.set_source(9, Some((Slot(3), Trust::Exact)));
        Rig {
            index,
            shards,
            domain,
            source: Source::new(9),
            out: Outbox::default(),
        }
    }

    fn settle(&mut self) {
        for (owner, lesson) in self.out.lessons.drain(..) {
            self.shards[owner].apply(lesson);
        }
        for shard in &mut self.shards {
            while shard.work(64) {}
        }
    }

    fn take(&mut self, sequence: u64, events: Vec<Value>) {
        let payload = batch(events);
        self.source
            .take(sequence, &payload, &self.index, &mut self.out);
        self.settle();
    }

    /// A live message, if its number is the next one; else what it says.
    fn live(&mut self, sequence: u64, events: Vec<Value>) -> Order {
        let order = self.source.order(sequence);
        if order == Order::Next {
            self.take(sequence, events);
        }
        order
    }

    /// Tokens that the source's worker need not compute.
    fn credit(&self, ids: &[u32], adapter: Option<&str>, salt: Option<&str>) -> u64 {
        let mut chain = Vec::new();
        block_chain(&self.index.keys, ids, BLOCK, adapter, salt, &mut chain);
        let mut reader = self.domain.reader(0);
        let pin = reader.pin();
        let mut credits = crate::route::Credits::default();
        let values = [1.0, 0.5, 0.5, 0.5];
        self.index.credit(
            &pin,
            &chain,
            ids.len() as u64,
            &values,
            |_| true,
            &mut credits,
        );
        credits.find(Slot(3))
    }
}

fn batch(events: Vec<Value>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let value = Value::Array(vec![Value::F64(1.0), Value::Array(events)]);
    rmpv::encode::write_value(&mut bytes, &value).unwrap();
    bytes
}

fn list<T: Copy + Into<u64>>(numbers: &[T]) -> Value {
    Value::Array(numbers.iter().map(|n| (*n).into().into()).collect())
}

fn event(kind: &str, fields: Vec<(&str, Value)>) -> Value {
    let tag = ("type", kind.into());
    let fields = fields.into_iter().chain([tag]);
    Value::Map(fields.map(|(name, value)| (name.into(), value)).collect())
}

fn stored(names: &[u64], parent: Option<u64>, ids: &[u32], more: Vec<(&str, Value)>) -> Value {
    let mut fields = vec![
        ("block_hashes", list(names)),
        ("parent_block_hash", parent.map_or(Value::Nil, Value::from)),
        ("token_ids", list(ids)),
        ("block_size", (BLOCK as u64).into()),
    ];
    fields.extend(more);
    event("BlockStored", fields)
}

fn removed(names: &[u64], more: Vec<(&str, Value)>) -> Value {
    let mut fields = vec![("block_hashes", list(names))];
    fields.extend(more);
    event("BlockRemoved", fields)
}

fn ids(count: u32) -> Vec<u32> {
    (100..100 + count).collect()
}

#[test]
fn blocks_come_and_go_as_the_engine_says() {
    let mut rig = Rig::new();
    let ids = ids(21);
    rig.take(0, vec![stored(&[1, 2], None, &ids[..8], vec![])]);
    assert_eq!(rig.credit(&ids, None, None), 8);
    rig.take(1, vec![stored(&[3, 4, 5], Some(2), &ids[8..20], vec![])]);
    assert_eq!(rig.credit(&ids, None, None), 20);
    // The last token is always computed.
    assert_eq!(rig.credit(&ids[..20], None, None), 16);
    // A parent that is not known says nothing about where the block stands.
    rig.take(2, vec![stored(&[6], Some(77), &ids[..4], vec![])]);
    rig.take(3, vec![removed(&[5, 6, 99], vec![])]);
    assert_eq!(rig.credit(&ids, None, None), 16);
    assert_eq!(rig.source.counts.passed_over, 3);
    rig.take(4, vec![event("AllBlocksCleared", vec![])]);
    assert_eq!(rig.credit(&ids, None, None), 0);
    assert_eq!(
        (rig.source.block_count(), rig.index.tree.node_count()),
        (0, 0)
    );
}

/// Two copies are let go twice; tiers on their own.
#[test]
fn copies_and_tiers_are_counted() {
    let mut rig = Rig::new();
    let ids = ids(9);
    let on = |medium: &str| vec![("medium", Value::from(medium))];
    let store = |medium| stored(&[1, 2], None, &ids[..8], on(medium));
    rig.take(0, vec![store("GPU"), store("GPU"), store("CPU")]);
    rig.take(1, vec![removed(&[1, 2], on("GPU"))]);
    assert_eq!(rig.credit(&ids, None, None), 8);
    rig.take(2, vec![removed(&[1, 2], on("GPU"))]);
    // In the host's memory, at half.
    assert_eq!(rig.credit(&ids, None, None), 4);
    rig.take(3, vec![removed(&[1, 2], on("CPU"))]);
    assert_eq!(rig.credit(&ids, None, None), 0);
    assert_eq!(rig.index.tree.membership_count(), 0);
}

#[test]
fn adapters_salts_and_other_extras_are_told_apart() {
    let mut rig = Rig::new();
    let ids = ids(9);
    let words = |words: Vec<Value>| {
        let blocks = vec![Value::Array(words), Value::Nil];
        ("extra_keys", Value::Array(blocks))
    };
    let adapter = || ("lora_name", Value::from("ad"));
    let first = |name, more| stored(&[name, name + 1], None, &ids[..8], more);
    rig.take(0, vec![first(1, vec![adapter(), words(vec!["ad".into()])])]);
    assert_eq!(rig.credit(&ids, None, None), 0);
    assert_eq!(rig.credit(&ids, Some("ad"), None), 8);
    assert!(rig.index.is_adapter("ad"));
    rig.take(1, vec![first(11, vec![words(vec!["salt".into()])])]);
    assert_eq!(rig.credit(&ids, None, Some("salt")), 8);
    assert_eq!(rig.credit(&ids, None, Some("other")), 0);
    // Media: no prompt of ids alone is that.
    let media = Value::Array(vec!["image".into(), 0.into()]);
    rig.take(2, vec![first(21, vec![words(vec![media])])]);
    assert_eq!(rig.credit(&ids, None, None), 0);
    rig.take(3, vec![first(31, vec![])]);
    assert_eq!(rig.credit(&ids, None, None), 8);
}

/// A block of a window is no hit of a whole prompt; and of one name in two groups only one's removal counts.
#[test]
fn groups_of_windows_are_passed_over() {
    let mut rig = Rig::new();
    let ids = ids(9);
    let group = |number: u64, kind: &str| {
        vec![
            ("group_idx", Value::from(number)),
            ("kv_cache_spec_kind", Value::from(kind)),
        ]
    };
    let store = |number, kind| stored(&[1, 2], None, &ids[..8], group(number, kind));
    rig.take(0, vec![store(0, "sliding_window")]);
    assert_eq!(rig.credit(&ids, None, None), 0);
    rig.take(1, vec![store(1, "full_attention")]);
    assert_eq!(rig.credit(&ids, None, None), 8);
    rig.take(2, vec![removed(&[1, 2], vec![("group_idx", 0.into())])]);
    assert_eq!(rig.credit(&ids, None, None), 8);
    rig.take(3, vec![removed(&[1, 2], vec![("group_idx", 1.into())])]);
    assert_eq!(rig.credit(&ids, None, None), 0);
}

#[test]
fn blocks_of_another_size_are_passed_over() {
    let mut rig = Rig::new();
    let ids = ids(9);
    let mut fields = vec![("block_size", Value::from(8_u64))];
    fields.extend([
        ("block_hashes", list(&[1_u64])),
        ("token_ids", list(&ids[..8])),
    ]);
    rig.take(0, vec![event("BlockStored", fields)]);
    assert_eq!(rig.credit(&ids, None, None), 0);
    assert_eq!(rig.source.counts.passed_over, 1);
}

#[test]
fn numbers_tell_gaps_old_messages_and_new_publishers() {
    let mut rig = Rig::new();
    rig.source.connected();
    assert_eq!(rig.live(0, vec![]), Order::Next);
    assert_eq!(rig.live(1, vec![]), Order::Next);
    assert_eq!(rig.live(4, vec![]), Order::Gap(2));
    // The replay gives what is missing, and what came live meanwhile.
    let mut replayed = |sequence| {
        let payload = batch(vec![Value::from(sequence)]);
        rig.source
            .take_replayed(sequence, &payload, &rig.index, &mut rig.out)
    };
    let due: Vec<Replayed> = (2..7).map(&mut replayed).collect();
    assert_eq!(due, [Replayed::Due; 5]);
    assert_eq!(replayed(6), Replayed::Known);
    assert_eq!(replayed(3), Replayed::Old);
    assert_eq!(replayed(9), Replayed::Late);
    assert_eq!(rig.live(5, vec![]), Order::Old);
    assert_eq!(rig.live(6, vec![]), Order::Old);
    assert_eq!(rig.live(10, vec![]), Order::Next);
    // It goes back: the same connection, another beginning.
    assert_eq!(rig.live(0, vec![]), Order::Anew);
    rig.source.forget(&rig.index, &mut rig.out);
    rig.take(0, vec![]);
    assert_eq!(rig.live(1, vec![]), Order::Next);
    // A new connection to a new process.
    rig.source.connected();
    assert_eq!(rig.source.order(1), Order::Anew);
    // And to the old one, after a pause: no number is repeated there.
    rig.source.connected();
    assert_eq!(rig.source.order(2), Order::Next);
    rig.source.connected();
    assert_eq!(rig.source.order(7), Order::Gap(2));
    // A message of that number, but another one.
    let other = batch(vec![Value::from(1), Value::from(2)]);
    let taken = rig
        .source
        .take_replayed(1, &other, &rig.index, &mut rig.out);
    assert_eq!(taken, Replayed::OfAnother);
}

/// Z2: after any events, forgetting takes everything back.
#[test]
fn forgetting_leaves_nothing() {
    for seed in 1..20_u64 {
        println!("seed {seed}");
        let mut state = seed;
        let mut below = |limit: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % limit
        };
        let mut rig = Rig::new();
        let mut names = BTreeSet::new();
        for sequence in 0..200 {
            let name = below(40);
            let parent = (below(3) > 0).then(|| below(40));
            let ids: Vec<u32> = (0..4).map(|_| below(3) as u32).collect();
            let medium = ["GPU", "CPU", "DISK"][below(3) as usize];
            let more = vec![("medium", Value::from(medium))];
            names.insert(name);
            let event = match below(4) {
                0 => removed(&[name], more),
                _ => stored(&[name], parent, &ids, more),
            };
            rig.take(sequence, vec![event]);
        }
        assert!(rig.index.tree.membership_count() > 0);
        rig.source.forget(&rig.index, &mut rig.out);
        rig.settle();
        assert_eq!(rig.index.tree.membership_count(), 0);
        assert_eq!(rig.source.block_count(), 0);
    }
}
