//! Own keys of an engine's KV blocks, made of token ids: what the exact index is asked with (by the core that has the
//! request) and what it is taught (by the control thread, from engines' events). Pure.
//!
//! An engine's own block hashes differ from engine to engine (vLLM seeds them anew in each process), so they are names only,
//! and the token ids that come with them are hashed here: block `i`'s key stands for all tokens up to its end, for the
//! adapter, and for what else the engine told apart (`extra_keys`: media, cache salt).
//!
//! Stable (R4), seeded and mixed as the prefix hashes of `key.rs` are, under a root of its own; of 40 bits
//! ([`BLOCK_KEY_BITS`]), so that an engine's names take less memory: among 20 million blocks one that is not there is taken for
//! another once in 55,000 times. So a prefix counts only if its last two blocks are held, by the same engine: once in 3,000
//! million (but where there are blocks below the device's memory, too, which are looked up one by one). A request that
//! meets it goes to a worker that has to compute more than was thought.

use std::borrow::Cow;

use shards::{BLOCK_KEY_BITS, PrefixHash};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::index::Index;
use super::key::{KeySeed, Mixer};
use super::scan::{Field, Fields, as_str};
use crate::shared::Route;

/// Most token ids of a prompt that are looked at; the rest of a longer one is taken for new.
pub const TOKEN_COUNT_MAX: usize = 4 << 20;

/// Makes keys.
pub struct BlockKeys {
    mixer: Mixer,
}

impl BlockKeys {
    /// The same seed gives the same keys.
    pub fn new(seed: KeySeed) -> BlockKeys {
        BlockKeys {
            mixer: Mixer::new(seed),
        }
    }

    /// Where the chains of an adapter begin; of the base model without one.
    pub fn root(&self, adapter: Option<&str>) -> PrefixHash {
        let first = self.mixer.hash(b"corelane block root");
        let link = adapter.map_or(first, |name| self.mixer.fold(first, self.named(name)));
        kept(link)
    }

    /// A word that blocks are told apart by: a cache salt.
    pub fn extra(&self, word: &[u8]) -> u64 {
        self.mixer.hash(word)
    }

    /// Two extras in order, as one.
    pub fn join(&self, extra: u64, next: u64) -> u64 {
        self.mixer.fold(extra, next)
    }

    /// The key of the block with these tokens behind `parent`; `extra`: 0 for none.
    #[inline]
    pub fn key(&self, parent: PrefixHash, tokens: &[u32], extra: u64) -> PrefixHash {
        self.chain(parent, self.block(tokens), extra)
    }

    fn named(&self, name: &str) -> u64 {
        xxh3_64_with_seed(name.as_bytes(), self.mixer.hash(b"corelane adapter"))
    }

    /// Independent of all that came before.
    #[inline]
    fn block(&self, tokens: &[u32]) -> u64 {
        // Without an allocation up to 16 tokens, vLLM's default block.
        let mut bytes = [0; 64];
        if let Some(bytes) = bytes.get_mut(..4 * tokens.len()) {
            for (place, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            return self.mixer.hash(bytes);
        }
        let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.mixer.hash(&bytes)
    }

    #[inline]
    fn chain(&self, parent: PrefixHash, block: u64, extra: u64) -> PrefixHash {
        let block = match extra {
            0 => block,
            extra => self.mixer.fold(block, extra),
        };
        kept(self.mixer.fold(parent.0, block))
    }
}

/// What is kept of a hash; 0 is nobody's key.
#[inline]
fn kept(hash: u64) -> PrefixHash {
    PrefixHash((hash >> (64 - BLOCK_KEY_BITS)).max(1))
}

/// Reads the token ids of a request in `ids` (cleared first), if the client sent ids. `None`: it sent text, several prompts,
/// or nothing. More than [`TOKEN_COUNT_MAX`] are counted, not read.
pub fn token_ids(route: Route, body: &[u8], fields: &Fields, ids: &mut Vec<u32>) -> Option<u64> {
    ids.clear();
    let field: Option<Field> = match route {
        Route::Completions => fields.prompt,
        Route::InferenceGenerate => fields.token_ids,
        Route::Generate => fields.input_ids.or(fields.prompt),
        _ => None,
    };
    read_ids(field?.raw(body), ids)
}

/// Whether a request's prompt is one text (or messages), from which its tokens would have to be made.
pub fn is_text(route: Route, body: &[u8], fields: &Fields) -> bool {
    let begins_as_text = |field: Option<Field>| {
        let raw = field.map_or(&[] as &[u8], |field| field.raw(body));
        let inner = raw.strip_prefix(b"[").unwrap_or(raw);
        inner.trim_ascii_start().first() == Some(&b'"')
    };
    match route {
        Route::ChatCompletions => fields.messages.is_some(),
        Route::Completions => begins_as_text(fields.prompt),
        Route::Generate => fields.input_ids.is_none() && begins_as_text(fields.prompt),
        _ => false,
    }
}

/// A JSON array of numbers, or an array of one such array. The body was scanned: it is JSON.
fn read_ids(raw: &[u8], ids: &mut Vec<u32>) -> Option<u64> {
    let inner = inside(raw)?;
    let inner = match inner.first() {
        Some(b'[') => inside(inner)?,
        _ => inner,
    };
    let (mut count, mut start) = (0, 0);
    let mut take = |end: usize| {
        let id = id_at(inner, start, end)?;
        if ids.len() < TOKEN_COUNT_MAX {
            ids.push(id);
        }
        (count, start) = (count + 1, end + 1);
        Some(())
    };
    // Where the commas are is found without knowing where the numbers begin, so that nothing waits for the number before.
    let (chunks, rest) = inner.as_chunks::<64>();
    for (index, chunk) in chunks.iter().enumerate() {
        let mut commas = commas_of(chunk);
        while commas != 0 {
            take(64 * index + commas.trailing_zeros() as usize)?;
            commas &= commas - 1;
        }
    }
    let rest_at = inner.len() - rest.len();
    for (place, byte) in rest.iter().enumerate() {
        if *byte == b',' {
            take(rest_at + place)?;
        }
    }
    take(inner.len())?;
    Some(count)
}

const ONES: u64 = 0x0101_0101_0101_0101;

/// A bit for each comma.
#[inline]
fn commas_of(chunk: &[u8; 64]) -> u64 {
    let (words, _) = chunk.as_chunks::<8>();
    let each = words.iter().zip((0..64).step_by(8));
    each.fold(0, |bits, (word, shift)| {
        let differs = u64::from_le_bytes(*word) ^ (ONES * u64::from(b','));
        // The highest bit of each byte: set where anything differs.
        let is_other = ((differs & (ONES * 0x7f)) + ONES * 0x7f) | differs;
        let equal = !is_other >> 7 & ONES;
        // Brought together in the topmost byte.
        bits | equal.wrapping_mul(0x0102_0408_1020_4080) >> 56 << shift
    })
}

/// The number that stands between two places, perhaps with white space around it. `None`: a text, a second prompt, a number
/// that is no id.
#[inline]
fn id_at(bytes: &[u8], start: usize, end: usize) -> Option<u32> {
    let start = start + usize::from(bytes.get(start) == Some(&b' '));
    let len = end.saturating_sub(start);
    if (1..=8).contains(&len)
        && let Some(last) = bytes[..end].last_chunk::<8>()
    {
        // The number's digits, behind zeros for what stands before it.
        let digits = u64::from_le_bytes(*last) ^ (ONES * u64::from(b'0'));
        let before = 64 - 8 * len as u32;
        let digits = digits >> before << before;
        if (digits.wrapping_add(ONES * (0x80 - 10)) | digits) & (ONES * 0x80) == 0 {
            return Some(number_of(digits));
        }
    }
    plain_id(&bytes[start.min(end)..end])
}

/// Eight digits, the first one lowest, two, four and eight at once (Lemire, "Quickly parsing eight digits").
#[inline]
fn number_of(digits: u64) -> u32 {
    const LOWEST: u64 = 0x0000_00ff_0000_00ff;
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
    let high = (pairs & LOWEST).wrapping_mul(100 + (1_000_000 << 32));
    let low = (pairs >> 16 & LOWEST).wrapping_mul(1 + (10_000 << 32));
    (high.wrapping_add(low) >> 32) as u32
}

fn plain_id(text: &[u8]) -> Option<u32> {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
    let mut digits = text.iter().filter(|byte| !is_space(byte)).peekable();
    digits.peek()?;
    digits.try_fold(0_u32, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| u32::from(byte - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

/// What stands between the brackets of an array.
fn inside(raw: &[u8]) -> Option<&[u8]> {
    let inner = raw.strip_prefix(b"[")?.strip_suffix(b"]")?;
    Some(inner.trim_ascii())
}

/// The keys of a request's blocks in `out` (cleared first), as its model's name and its salt tell them apart: the `model` is an
/// adapter if events named it so, or, where the base model's name is known, if it is another one.
pub fn request_chain(
    index: &Index,
    base_model: Option<&str>,
    ids: &[u32],
    body: &[u8],
    fields: &Fields,
    model: Option<&str>,
    out: &mut Vec<PrefixHash>,
) {
    let named = as_str(body, fields.lora);
    let is_adapter = |model: &str| match base_model {
        Some(base) => model != base,
        None => index.is_adapter(model),
    };
    let adapter = named.as_deref().or(model.filter(|model| is_adapter(model)));
    let salt = salt_of(body, fields);
    block_chain(
        &index.keys,
        ids,
        index.block_tokens,
        adapter,
        salt.as_deref(),
        out,
    );
}

/// The keys of a prompt's blocks in `out` (cleared first): those that an engine can reuse, which is all whole blocks but
/// one that ends the prompt, as the last token is always computed (vLLM).
pub fn block_chain(
    keys: &BlockKeys,
    ids: &[u32],
    block_tokens: usize,
    adapter: Option<&str>,
    salt: Option<&str>,
    out: &mut Vec<PrefixHash>,
) {
    out.clear();
    let usable = ids.len().saturating_sub(1);
    let mut link = keys.root(adapter);
    // vLLM mixes the salt into the first block alone.
    let mut extra = salt.map_or(0, |salt| keys.extra(salt.as_bytes()));
    for block in ids[..usable].chunks_exact(block_tokens.max(1)) {
        link = keys.key(link, block, extra);
        extra = 0;
        out.push(link);
    }
}

/// The salt that keeps a request's blocks to itself and its like.
pub fn salt_of<'b>(body: &'b [u8], fields: &Fields) -> Option<Cow<'b, str>> {
    as_str(body, fields.cache_salt).filter(|salt| !salt.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids_of(text: &str) -> Option<(u64, Vec<u32>)> {
        let mut ids = Vec::new();
        read_ids(text.as_bytes(), &mut ids).map(|count| (count, ids))
    }

    #[test]
    fn ids_are_read_and_nothing_else() {
        let table: [(&str, Option<&[u32]>); 14] = [
            ("[1,2,3]", Some(&[1, 2, 3])),
            ("[ 1 ,\n2\t, 4294967295 ]", Some(&[1, 2, u32::MAX])),
            ("[[7,8]]", Some(&[7, 8])),
            ("[ [7, 8] ]", Some(&[7, 8])),
            ("[0]", Some(&[0])),
            ("[]", None),
            ("[[]]", None),
            ("\"1,2\"", None),
            ("[\"a\"]", None),
            ("[1,2],[3]", None),
            ("[[1,2],[3]]", None),
            ("[-1]", None),
            ("[1.5]", None),
            ("[4294967296]", None),
        ];
        for (text, wanted) in table {
            let wanted = wanted.map(|ids| (ids.len() as u64, ids.to_vec()));
            assert_eq!(ids_of(text), wanted, "{text}");
        }
    }

    /// Numbers of every length, at every place, with and without white space, against how they were written; and what is no
    /// number, at every place.
    #[test]
    fn any_ids_are_read_as_they_were_written() {
        let mut rng = crate::route::Rng::new(11);
        for round in 0..3_000 {
            let count = 1 + rng.below(60);
            let wanted: Vec<u32> = (0..count)
                .map(|_| (rng.next() >> (32 + rng.below(32))) as u32)
                .collect();
            let spaces = ["", " ", "\n\t ", "  "][rng.below(4)];
            let texts: Vec<String> = wanted.iter().map(u32::to_string).collect();
            let text = format!("[{spaces}{}]", texts.join(&format!(",{spaces}")));
            assert_eq!(ids_of(&text), Some((count as u64, wanted)), "{text}");
            let no_ids = [
                "-1",
                "1.5",
                "4294967296",
                "1e3",
                "\"a\"",
                "",
                "[1]",
                "12345678901",
                "1:",
                "1/",
            ];
            let mut texts = texts;
            texts[rng.below(count)] = no_ids[round % no_ids.len()].to_owned();
            let text = format!("[{}]", texts.join(","));
            let is_one_prompt = text == "[[1]]";
            assert_eq!(ids_of(&text).is_some(), is_one_prompt, "{text}");
        }
    }

    fn chain(ids: &[u32], adapter: Option<&str>, salt: Option<&str>) -> Vec<PrefixHash> {
        let mut out = Vec::new();
        let keys = BlockKeys::new(KeySeed(3));
        block_chain(&keys, ids, 4, adapter, salt, &mut out);
        out
    }

    #[test]
    fn a_chain_stands_for_all_before_its_end_and_for_what_tells_apart() {
        let ids: Vec<u32> = (0..13).collect();
        let plain = chain(&ids, None, None);
        assert_eq!(plain.len(), 3);
        // A block that ends the prompt cannot be reused.
        assert_eq!(chain(&ids[..12], None, None), plain[..2]);
        assert_eq!(chain(&[], None, None), []);
        let mut other = ids.clone();
        other[5] = 99;
        let other = chain(&other, None, None);
        assert_eq!((other[0], other[1] == plain[1]), (plain[0], false));
        assert_ne!(other[2], plain[2]);
        let with_adapter = chain(&ids, Some("a"), None);
        let with_salt = chain(&ids, None, Some("s"));
        for (index, key) in plain.iter().enumerate() {
            assert_ne!(*key, with_adapter[index]);
            assert_ne!(*key, with_salt[index]);
            assert_ne!(with_adapter[index], with_salt[index]);
        }
    }

    #[test]
    fn text_is_told_from_ids() {
        let is_text_at = |route, body: &str| {
            let fields = crate::route::scan(body.as_bytes()).unwrap();
            is_text(route, body.as_bytes(), &fields)
        };
        let completions = |body: &str| is_text_at(Route::Completions, body);
        assert!(completions(r#"{"prompt": "x"}"#));
        assert!(completions(r#"{"prompt": [ "x" ]}"#));
        for body in [
            r#"{"prompt": [1, 2]}"#,
            r#"{"prompt": [[1]]}"#,
            "{}",
            r#"{"prompt": []}"#,
        ] {
            assert!(!completions(body), "{body}");
        }
        assert!(is_text_at(Route::ChatCompletions, r#"{"messages": []}"#));
        assert!(!is_text_at(
            Route::Generate,
            r#"{"input_ids": [1], "prompt": "x"}"#
        ));
        assert!(!is_text_at(Route::Embeddings, r#"{"input": "x"}"#));
    }

    #[test]
    fn long_blocks_are_hashed_whole() {
        let keys = BlockKeys::new(KeySeed(3));
        let root = keys.root(None);
        let mut ids = [5; 64];
        let first = keys.key(root, &ids, 0);
        ids[63] = 6;
        assert_ne!(first, keys.key(root, &ids, 0));
    }
}
