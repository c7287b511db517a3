//! Prefix hashes of a prompt: what the tree is asked with and what it learns. Runs on the core that has the request.
//!
//! The engine can reuse what is the same from the start, so a prompt becomes a chain: hash `i` stands for everything
//! up to the end of block `i`. The chain starts at a root made of what must be equal for anything to be reused at all
//! (model, adapter, cache salt, tools, and the system text where it stands outside the conversation). After it come
//! fixed blocks of the prompt's raw bytes: the next turn of a conversation repeats the bytes of the last one, so
//! nothing has to be unescaped, and a media part is just a long run of bytes.
//!
//! Stable (R4): XXH3 with a seed, and integer arithmetic; head nodes with the same seed exchange keys. Little-endian
//! and big-endian machines agree.
//!
//! Can a client make two prompts collide? Every block is hashed under the seed, and the chain mixes block hashes
//! under two keys drawn from it, so without the seed nobody can compute a collision ahead of time or test one
//! offline; operators whose clients are strangers should give their head nodes a random seed. XXH3 is no message
//! authentication code all the same, and it need not be: a collision makes the router believe that a worker holds a
//! prefix it does not hold, which costs that request one prefill. The worker compares its own cache by its own keys,
//! so neither an answer nor a cache entry can pass from one prompt to another here.

use shards::PrefixHash;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::scan::{Field, Fields};
use crate::shared::Route;

/// Length of a block. A conversation's turns differ by a few hundred bytes, and a system prompt should not have to be
/// long to count; shorter blocks would cost the tree more entries.
pub const BLOCK_BYTES: usize = 128;

/// Length of a block after the first [`LONG_FROM_BLOCK`]. What is longer than 512 KiB is nearly always media in a
/// `data:` URL, where where exactly two prompts part does not matter: it differs from the start or not at all.
pub const LONG_BLOCK_BYTES: usize = 4096;

/// Number of short blocks; they cover 512 KiB.
pub const LONG_FROM_BLOCK: usize = 4096;

/// Nothing is hashed after this many bytes of prompt: a request's cost and its share of the tree (8,064 entries) stay
/// bounded whatever it carries.
pub const HASHED_BYTES_MAX: usize = 16 * 1024 * 1024;

const SHORT_BYTES: usize = LONG_FROM_BLOCK * BLOCK_BYTES;

/// Seed of all hashes. Head nodes that exchange keys need the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeySeed(pub u64);

/// Prompt bytes that the first `blocks` blocks of a chain cover.
pub fn bytes_of_blocks(blocks: usize) -> u64 {
    let long = blocks.saturating_sub(LONG_FROM_BLOCK);
    (blocks - long) as u64 * BLOCK_BYTES as u64 + long as u64 * LONG_BLOCK_BYTES as u64
}

/// Makes the chain of a request's prompt in `out` (cleared first): one hash for each whole block.
///
/// Returns the prompt's length in bytes, at most [`HASHED_BYTES_MAX`]: what `bytes_of_blocks(matched)` is a share of.
/// `None`: the request has no prompt, and so no key; never a constant one. `fields` are those of this `body`.
pub fn chain(
    seed: KeySeed,
    route: Route,
    body: &[u8],
    fields: &Fields,
    out: &mut Vec<PrefixHash>,
) -> Option<u64> {
    out.clear();
    let prompt = prompt_of(route, body, fields)?;
    let mixer = Mixer::new(seed);
    let mut link = root(&mixer, route, body, fields);
    let mut add = |block: &[u8]| {
        link = mixer.fold(link, mixer.hash(block));
        // 0 is the tree's word for "nothing".
        out.push(PrefixHash(link.max(1)));
    };
    match prompt {
        Prompt::One(bytes) => blocks_of(bytes, &mut add),
        Prompt::Two(first, then) => blocks_of_two(first, then, &mut add),
    }
    Some(prompt.len().min(HASHED_BYTES_MAX) as u64)
}

/// The hash of a prompt's first `bytes` bytes, and of what must be equal for anything of it to be reused: the key of
/// `prefix_hash`. A prompt that is shorter counts whole. `None`: there is no prompt.
pub fn prefix_hash(
    seed: KeySeed,
    route: Route,
    body: &[u8],
    fields: &Fields,
    bytes: usize,
) -> Option<u64> {
    let prompt = prompt_of(route, body, fields)?;
    let mixer = Mixer::new(seed);
    let root = root(&mixer, route, body, fields);
    let (first, then) = match prompt {
        Prompt::One(first) => (first, &[][..]),
        Prompt::Two(first, then) => (first, then),
    };
    let first = &first[..first.len().min(bytes)];
    let then = &then[..then.len().min(bytes - first.len())];
    let mut hasher = Xxh3::with_seed(seed.0);
    hasher.update(first);
    hasher.update(then);
    Some(mixer.fold(root, hasher.digest()))
}

/// What is hashed in blocks: one raw value, or two as if they stood one after the other.
#[derive(Clone, Copy)]
enum Prompt<'b> {
    One(&'b [u8]),
    Two(&'b [u8], &'b [u8]),
}

impl Prompt<'_> {
    fn len(self) -> usize {
        match self {
            Prompt::One(bytes) => bytes.len(),
            Prompt::Two(first, then) => first.len() + then.len(),
        }
    }
}

/// Which field is the prompt, by endpoint (vLLM's and SGLang's request schemas).
fn prompt_of<'b>(route: Route, body: &'b [u8], fields: &Fields) -> Option<Prompt<'b>> {
    let first_of = |choice: &[Option<Field>]| {
        choice
            .iter()
            .find_map(|field| value_of(body, *field))
            .map(Prompt::One)
    };
    match route {
        Route::ChatCompletions | Route::Messages => first_of(&[fields.messages]),
        Route::Completions => first_of(&[fields.prompt]),
        Route::Embeddings | Route::Pooling => first_of(&[fields.input, fields.messages]),
        Route::Responses => first_of(&[fields.input]),
        Route::Generate => first_of(&[fields.text, fields.prompt, fields.input_ids]),
        Route::InferenceGenerate => first_of(&[fields.token_ids]),
        Route::Tokenize => first_of(&[fields.prompt, fields.messages]),
        // The model reads the query before each document, so that is the order in which bytes can be shared.
        Route::Rerank => match (
            value_of(body, fields.query),
            value_of(body, fields.documents),
        ) {
            (Some(query), Some(documents)) => Some(Prompt::Two(query, documents)),
            (one, other) => one.or(other).map(Prompt::One),
        },
        Route::Score => first_of(&[fields.input, fields.prompt, fields.text]),
        Route::Admin | Route::Other => None,
    }
}

/// The raw value, unless it is missing or `null`: workers treat the two alike.
fn value_of(body: &[u8], field: Option<Field>) -> Option<&[u8]> {
    field
        .map(|field| field.raw(body))
        .filter(|raw| *raw != b"null")
}

/// What must be equal for two prompts to share anything. Each part goes in with its place and its length, so that no
/// two different sets of parts read the same.
fn root(mixer: &Mixer, route: Route, body: &[u8], fields: &Fields) -> u64 {
    let beside = match route {
        Route::Messages => fields.system,
        Route::Responses => fields.instructions,
        _ => None,
    };
    let parts = [
        fields.model,
        fields.lora,
        fields.cache_salt,
        fields.tools,
        beside,
    ];
    let mut root = mixer.first;
    for (place, part) in parts.into_iter().enumerate() {
        if let Some(raw) = value_of(body, part) {
            root = mixer.fold(root, (raw.len() as u64) << 8 | place as u64);
            root = mixer.fold(root, mixer.hash(raw));
        }
    }
    root
}

/// Whole blocks of the first [`HASHED_BYTES_MAX`] bytes.
fn blocks_of(bytes: &[u8], add: &mut impl FnMut(&[u8])) {
    let bytes = &bytes[..bytes.len().min(HASHED_BYTES_MAX)];
    let (short, long) = bytes.split_at(bytes.len().min(SHORT_BYTES));
    short.chunks_exact(BLOCK_BYTES).for_each(&mut *add);
    long.chunks_exact(LONG_BLOCK_BYTES).for_each(add);
}

/// The same over `first` followed by `then`. Only the block that has bytes of both is copied.
fn blocks_of_two(first: &[u8], then: &[u8], add: &mut impl FnMut(&[u8])) {
    let length = (first.len() + then.len()).min(HASHED_BYTES_MAX);
    let mut copy = [0; LONG_BLOCK_BYTES];
    let mut start = 0;
    loop {
        let size = if start < SHORT_BYTES {
            BLOCK_BYTES
        } else {
            LONG_BLOCK_BYTES
        };
        let end = start + size;
        if end > length {
            return;
        }
        if end <= first.len() {
            add(&first[start..end]);
        } else if start >= first.len() {
            add(&then[start - first.len()..end - first.len()]);
        } else {
            let (of_first, of_then) = copy[..size].split_at_mut(first.len() - start);
            of_first.copy_from_slice(&first[start..]);
            of_then.copy_from_slice(&then[..end - first.len()]);
            add(&copy[..size]);
        }
        start = end;
    }
}

/// The seed and what is drawn from it.
pub(super) struct Mixer {
    seed: u64,
    first: u64,
    link_key: u64,
    block_key: u64,
}

impl Mixer {
    pub(super) fn new(KeySeed(seed): KeySeed) -> Mixer {
        // Three independent values of the seed; the texts only have to differ.
        let draw = |text: &[u8]| xxh3_64_with_seed(text, seed);
        Mixer {
            seed,
            first: draw(b"corelane prefix root"),
            link_key: draw(b"corelane link key"),
            block_key: draw(b"corelane block key"),
        }
    }

    /// Independent of all that came before, so that the processor works on several blocks at a time.
    #[inline]
    pub(super) fn hash(&self, bytes: &[u8]) -> u64 {
        xxh3_64_with_seed(bytes, self.seed)
    }

    /// One step of the chain: both halves of a 128-bit product, as in wyhash. A few cycles, the only part that has to
    /// wait for the block before. The keys differ, so that exchanging the two operands gives something else.
    #[inline]
    pub(super) fn fold(&self, link: u64, block: u64) -> u64 {
        let product = u128::from(link ^ self.link_key) * u128::from(block ^ self.block_key);
        (product as u64) ^ ((product >> 64) as u64)
    }
}

#[cfg(test)]
#[path = "key_tests.rs"]
mod tests;
