//! Batches of KV events as vLLM publishes them: msgpack, `[time, [event, ...], data_parallel_rank]`. Pure.
//!
//! Events are arrays that begin with their tag, or (since vLLM pull request 42892) maps with the tag under `type`; the batch
//! itself an array or a map. Fields that are missing at the end, or unknown, are taken as they are: absent, or of no
//! interest. What does not hold together (token ids that are not whole blocks) makes its own event bad, not the batch.
//!
//! Everything has a bound: the message's bytes (the socket's), events of a batch, depth.

use rmp::Marker;
use xxhash_rust::xxh3::xxh3_64;

use crate::route::{BlockKeys, DEVICE, DISK, EXTERNAL, HOST};

/// Most events of a batch, as in vllm-router.
pub const EVENT_COUNT_MAX: usize = 4096;
/// How deep a message may nest.
const DEPTH_MAX: usize = 16;

/// A batch that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadBatch;

/// One event. Lists live in the decoder's scratch.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'e> {
    /// Blocks came.
    Stored(Stored<'e>),
    /// Blocks went.
    Removed {
        /// As the engine calls them.
        names: &'e [u64],
        /// From which tier.
        tier: usize,
        /// Of which cache group.
        group: Option<u64>,
    },
    /// All blocks went.
    Cleared,
    /// Of no interest here: an event of a kind not known.
    Other,
    /// It makes no sense.
    Bad,
}

/// Blocks that came: a run, each behind the one before.
#[derive(Debug, PartialEq, Eq)]
pub struct Stored<'e> {
    /// As the engine calls them.
    pub names: &'e [u64],
    /// The block before the first. `None`: they begin a prompt.
    pub parent: Option<u64>,
    /// All their tokens, `block_tokens` each.
    pub tokens: &'e [u32],
    /// Tokens of a block.
    pub block_tokens: usize,
    /// The adapter they were computed with.
    pub adapter: Option<&'e str>,
    /// What else each was told apart by, 0 for nothing; empty: nothing anywhere.
    pub extras: &'e [u64],
    /// Where they are.
    pub tier: usize,
    /// Of which cache group (models with several kinds of attention have several).
    pub group: Option<u64>,
    /// Whether the group keeps every block of a prompt, as far as the event says.
    pub is_whole: bool,
}

/// Scratch, reused from batch to batch.
#[derive(Debug, Default)]
pub struct Decoder {
    names: Vec<u64>,
    tokens: Vec<u32>,
    extras: Vec<u64>,
}

/// The fields that are looked at, as raw msgpack.
#[derive(Default)]
struct Raw<'b> {
    tag: &'b [u8],
    block_hashes: &'b [u8],
    parent: &'b [u8],
    token_ids: &'b [u8],
    block_size: &'b [u8],
    lora_id: &'b [u8],
    medium: &'b [u8],
    lora_name: &'b [u8],
    extra_keys: &'b [u8],
    group: &'b [u8],
    kind: &'b [u8],
    window: &'b [u8],
}

impl Decoder {
    /// Gives each event of a batch to `take`, in order.
    ///
    /// # Errors
    /// The payload is no batch; events before the fault were given.
    pub fn decode(
        &mut self,
        payload: &[u8],
        keys: &BlockKeys,
        mut take: impl FnMut(Event<'_>),
    ) -> Result<(), BadBatch> {
        let mut batch = Cursor(payload);
        let mut events = match batch.next().ok_or(BadBatch)? {
            Item::Array(2..) => {
                batch.skip(DEPTH_MAX).ok_or(BadBatch)?;
                batch
            }
            Item::Map(count) => named(&mut batch, count, b"events").ok_or(BadBatch)?,
            _ => return Err(BadBatch),
        };
        let Some(Item::Array(count)) = events.next() else {
            return Err(BadBatch);
        };
        if count > EVENT_COUNT_MAX {
            return Err(BadBatch);
        }
        for _ in 0..count {
            let mut raw = Raw::default();
            let is_event = raw.read(&mut events).ok_or(BadBatch)?;
            let event = is_event.then(|| self.event(&raw, keys)).flatten();
            take(event.unwrap_or(Event::Bad));
        }
        Ok(())
    }

    fn event<'e>(&'e mut self, raw: &Raw<'e>, keys: &BlockKeys) -> Option<Event<'e>> {
        match text(raw.tag)? {
            "BlockStored" => self.stored(raw, keys).map(Event::Stored),
            "BlockRemoved" => {
                self.read_names(raw.block_hashes)?;
                Some(Event::Removed {
                    names: &self.names,
                    tier: tier(raw.medium),
                    group: integer(raw.group),
                })
            }
            "AllBlocksCleared" => Some(Event::Cleared),
            _ => Some(Event::Other),
        }
    }

    fn stored<'e>(&'e mut self, raw: &Raw<'e>, keys: &BlockKeys) -> Option<Stored<'e>> {
        self.read_names(raw.block_hashes)?;
        let block_tokens = usize::try_from(integer(raw.block_size)?).ok()?;
        self.read_tokens(raw.token_ids)?;
        if block_tokens == 0 || self.tokens.len() != self.names.len().checked_mul(block_tokens)? {
            return None;
        }
        let adapter = text(raw.lora_name);
        // An adapter without a name is one that no request can name.
        let adapter = adapter.or(integer(raw.lora_id).map(|_| "an adapter without a name"));
        self.read_extras(raw.extra_keys, text(raw.lora_name), keys)?;
        Some(Stored {
            parent: match raw.parent {
                [] => None,
                raw => match Cursor(raw).next()? {
                    Item::Nil => None,
                    item => Some(name_of(item)?),
                },
            },
            names: &self.names,
            tokens: &self.tokens,
            block_tokens,
            adapter,
            extras: &self.extras,
            tier: tier(raw.medium),
            group: integer(raw.group),
            is_whole: is_whole(raw),
        })
    }

    fn read_names(&mut self, raw: &[u8]) -> Option<()> {
        self.names.clear();
        let mut list = Cursor(raw);
        let Item::Array(count) = list.next()? else {
            return None;
        };
        for _ in 0..count {
            self.names.push(name_of(list.next()?)?);
        }
        Some(())
    }

    fn read_tokens(&mut self, raw: &[u8]) -> Option<()> {
        self.tokens.clear();
        let mut list = Cursor(raw);
        let Item::Array(count) = list.next()? else {
            return None;
        };
        // Each takes a byte at least.
        self.tokens.reserve(count.min(raw.len()));
        for _ in 0..count {
            let Item::Integer(id) = list.next()? else {
                return None;
            };
            self.tokens.push(u32::try_from(id).ok()?);
        }
        Some(())
    }

    /// vLLM lists for each block: the adapter's name (which is in the root already), media with their places, the cache salt.
    fn read_extras(&mut self, raw: &[u8], adapter: Option<&str>, keys: &BlockKeys) -> Option<()> {
        self.extras.clear();
        let mut list = Cursor(raw);
        let count = match list.next() {
            None | Some(Item::Nil) => return Some(()),
            Some(Item::Array(count)) => count,
            Some(_) => return None,
        };
        for _ in 0..count {
            let mut extra = 0;
            let word_count = match list.next()? {
                Item::Nil => 0,
                Item::Array(count) => count,
                _ => return None,
            };
            for _ in 0..word_count {
                let word = list.raw()?;
                let word = match Cursor(word).next()? {
                    Item::Text(name) if Some(name) == adapter.map(str::as_bytes) => continue,
                    Item::Text(bytes) | Item::Bytes(bytes) => bytes,
                    Item::Nil => continue,
                    _ => word,
                };
                let hash = keys.extra(word);
                extra = if extra == 0 {
                    hash
                } else {
                    keys.join(extra, hash)
                };
            }
            self.extras.push(extra);
        }
        (self.extras.is_empty() || self.extras.len() == self.names.len()).then_some(())
    }
}

impl<'b> Raw<'b> {
    /// One event. `None`: the batch ends in it. False: it is none.
    fn read(&mut self, events: &mut Cursor<'b>) -> Option<bool> {
        let before = *events;
        match events.next()? {
            Item::Array(count) => {
                for place in 0..count {
                    let value = events.raw()?;
                    self.place(place, value);
                }
                Some(true)
            }
            Item::Map(count) => {
                for _ in 0..count {
                    let name = events.raw()?;
                    let value = events.raw()?;
                    if let Some(name) = text(name) {
                        self.name(name, value);
                    }
                }
                Some(true)
            }
            _ => {
                *events = before;
                events.raw()?;
                Some(false)
            }
        }
    }

    /// A field of an array: `BlockStored` and `BlockRemoved` have fields of their own from the third on.
    fn place(&mut self, place: usize, value: &'b [u8]) {
        let is_removed = text(self.tag) == Some("BlockRemoved");
        let field = match (is_removed, place) {
            (_, 0) => &mut self.tag,
            (_, 1) => &mut self.block_hashes,
            (true, 2) => &mut self.medium,
            (true, 3) => &mut self.group,
            (true, _) => return,
            (false, 2) => &mut self.parent,
            (false, 3) => &mut self.token_ids,
            (false, 4) => &mut self.block_size,
            (false, 5) => &mut self.lora_id,
            (false, 6) => &mut self.medium,
            (false, 7) => &mut self.lora_name,
            (false, 8) => &mut self.extra_keys,
            (false, 9) => &mut self.group,
            (false, 10) => &mut self.kind,
            (false, 11) => &mut self.window,
            _ => return,
        };
        *field = value;
    }

    fn name(&mut self, name: &str, value: &'b [u8]) {
        let field = match name {
            "type" => &mut self.tag,
            "block_hashes" => &mut self.block_hashes,
            "parent_block_hash" => &mut self.parent,
            "token_ids" => &mut self.token_ids,
            "block_size" => &mut self.block_size,
            "lora_id" => &mut self.lora_id,
            "medium" => &mut self.medium,
            "lora_name" => &mut self.lora_name,
            "extra_keys" => &mut self.extra_keys,
            "group_idx" => &mut self.group,
            "kv_cache_spec_kind" => &mut self.kind,
            "kv_cache_spec_sliding_window" => &mut self.window,
            _ => return,
        };
        *field = value;
    }
}

/// The value of a map under a name, all others skipped.
fn named<'b>(map: &mut Cursor<'b>, count: usize, wanted: &[u8]) -> Option<Cursor<'b>> {
    let mut found = None;
    for _ in 0..count {
        let name = map.next()?;
        let value = map.raw()?;
        if matches!(name, Item::Text(name) if name == wanted) {
            found = Some(Cursor(value));
        }
    }
    found
}

fn text(raw: &[u8]) -> Option<&str> {
    match Cursor(raw).next()? {
        Item::Text(bytes) => str::from_utf8(bytes).ok(),
        _ => None,
    }
}

fn integer(raw: &[u8]) -> Option<u64> {
    match Cursor(raw).next()? {
        Item::Integer(number) => Some(number),
        _ => None,
    }
}

/// A block's name is opaque: the integer, or a hash of the bytes.
fn name_of(item: Item<'_>) -> Option<u64> {
    match item {
        Item::Integer(number) => Some(number),
        Item::Bytes(bytes) | Item::Text(bytes) => Some(xxh3_64(bytes)),
        _ => None,
    }
}

/// What vLLM and its connectors call their media. Nothing said: the device.
fn tier(raw: &[u8]) -> usize {
    let Some(medium) = text(raw) else {
        return DEVICE;
    };
    match medium.to_ascii_lowercase().as_str() {
        "gpu" | "hbm" | "device" | "xpu" | "tpu" | "npu" => DEVICE,
        "cpu" | "host" | "dram" | "cpu_pinned" | "cpu_tier1" => HOST,
        "disk" | "nvme" | "ssd" | "fs" | "storage" | "cpu_tier2" => DISK,
        _ => EXTERNAL,
    }
}

/// Whether the group's blocks are those of whole prompts: what a window has left behind is gone, though a block of it is there.
fn is_whole(raw: &Raw<'_>) -> bool {
    let has_window = integer(raw.window).is_some();
    let kind = text(raw.kind).map(str::to_ascii_lowercase);
    let is_partial = |kind: String| {
        ["sliding", "chunked", "mamba", "cross", "encoder", "linear"]
            .iter()
            .any(|partial| kind.contains(partial))
    };
    !has_window && !kind.is_some_and(is_partial)
}

/// A value, without what it contains.
#[derive(Clone, Copy, Debug)]
enum Item<'b> {
    Nil,
    /// Negative ones as their 64 bits.
    Integer(u64),
    Text(&'b [u8]),
    Bytes(&'b [u8]),
    /// So many values follow.
    Array(usize),
    /// So many names with values follow.
    Map(usize),
    /// A boolean, a float, an extension.
    Other,
}

/// What is left of a message.
#[derive(Clone, Copy)]
struct Cursor<'b>(&'b [u8]);

impl<'b> Cursor<'b> {
    #[inline]
    fn take(&mut self, count: usize) -> Option<&'b [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// A big-endian number of so many bytes.
    #[inline]
    fn number(&mut self, size: usize) -> Option<u64> {
        let bytes = self.take(size)?;
        Some(bytes.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
    }

    fn length(&mut self, size: usize) -> Option<usize> {
        usize::try_from(self.number(size)?).ok()
    }

    /// The next value; of a list or a map the head only.
    #[inline]
    fn next(&mut self) -> Option<Item<'b>> {
        let marker = Marker::from_u8(self.take(1)?[0]);
        Some(match marker {
            Marker::Null => Item::Nil,
            Marker::FixPos(number) => Item::Integer(number.into()),
            Marker::FixNeg(number) => Item::Integer(i64::from(number) as u64),
            Marker::U8 => Item::Integer(self.number(1)?),
            Marker::U16 => Item::Integer(self.number(2)?),
            Marker::U32 => Item::Integer(self.number(4)?),
            Marker::U64 | Marker::I64 => Item::Integer(self.number(8)?),
            Marker::I8 => Item::Integer(i64::from(self.number(1)? as i8) as u64),
            Marker::I16 => Item::Integer(i64::from(self.number(2)? as i16) as u64),
            Marker::I32 => Item::Integer(i64::from(self.number(4)? as i32) as u64),
            Marker::FixStr(length) => Item::Text(self.take(length.into())?),
            Marker::Str8 => self.text(1)?,
            Marker::Str16 => self.text(2)?,
            Marker::Str32 => self.text(4)?,
            Marker::Bin8 => self.bytes(1)?,
            Marker::Bin16 => self.bytes(2)?,
            Marker::Bin32 => self.bytes(4)?,
            Marker::FixArray(count) => Item::Array(count.into()),
            Marker::Array16 => Item::Array(self.length(2)?),
            Marker::Array32 => Item::Array(self.length(4)?),
            Marker::FixMap(count) => Item::Map(count.into()),
            Marker::Map16 => Item::Map(self.length(2)?),
            Marker::Map32 => Item::Map(self.length(4)?),
            Marker::True | Marker::False => Item::Other,
            Marker::F32 => self.other(4)?,
            Marker::F64 => self.other(8)?,
            // An extension's type is a byte more.
            Marker::FixExt1 => self.other(2)?,
            Marker::FixExt2 => self.other(3)?,
            Marker::FixExt4 => self.other(5)?,
            Marker::FixExt8 => self.other(9)?,
            Marker::FixExt16 => self.other(17)?,
            Marker::Ext8 => self.extension(1)?,
            Marker::Ext16 => self.extension(2)?,
            Marker::Ext32 => self.extension(4)?,
            Marker::Reserved => return None,
        })
    }

    fn text(&mut self, size: usize) -> Option<Item<'b>> {
        let length = self.length(size)?;
        self.take(length).map(Item::Text)
    }

    fn bytes(&mut self, size: usize) -> Option<Item<'b>> {
        let length = self.length(size)?;
        self.take(length).map(Item::Bytes)
    }

    fn other(&mut self, length: usize) -> Option<Item<'b>> {
        self.take(length).map(|_| Item::Other)
    }

    fn extension(&mut self, size: usize) -> Option<Item<'b>> {
        let length = self.length(size)?.checked_add(1)?;
        self.other(length)
    }

    /// The next value whole, and past it.
    fn raw(&mut self) -> Option<&'b [u8]> {
        let before = self.0;
        self.skip(DEPTH_MAX)?;
        Some(&before[..before.len() - self.0.len()])
    }

    fn skip(&mut self, depth: usize) -> Option<()> {
        let count = match self.next()? {
            Item::Array(count) => count,
            Item::Map(count) => count.checked_mul(2)?,
            _ => return Some(()),
        };
        let depth = depth.checked_sub(1)?;
        // Ends with the message, whatever the count says.
        (0..count).try_for_each(|_| self.skip(depth))
    }
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
