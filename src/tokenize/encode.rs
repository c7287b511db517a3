//! Text to token ids, a segment at a time. Off the cores.
//!
//! The text is cut where a special token begins (`<|im_start|>`, say), and the ids of each segment are remembered: of a
//! conversation's next turn only what is new is tokenised, and a system prompt once for all conversations.
//!
//! Invariant K1: the ids of the segments, one after the other, are those of the whole text. A tokenizer first splits off
//! the added tokens that stand in the text as they are, and treats each piece between them for itself; so it is enough that
//! every place where we cut is one where it splits, whatever stands before and behind. A token is *clean*, and we cut at it, if
//! no added token can lie over its first byte without beginning there, and none that begins there takes white space on its
//! left along, or asks for words round it. The first segment is remembered apart, as some tokenizers treat a text's begin otherwise.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{AddedToken, Tokenizer};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Bytes that a remembered segment costs beside its ids, about.
const SEGMENT_BYTES: usize = 64;

/// A tokenizer with its memory.
pub struct Encoder {
    tokenizer: Tokenizer,
    /// Finds clean tokens; none: texts are tokenised whole.
    cuts: Option<AhoCorasick>,
    /// What is put round a text with special tokens.
    around: Option<(Vec<u32>, Vec<u32>)>,
    known: Mutex<Known>,
}

/// Segments remembered: those used of late, and those of before. When the first are half of what there may be, they become
/// the second, whose places are free.
struct Known {
    bytes_max: usize,
    bytes: usize,
    new: HashMap<u128, Arc<[u32]>, ahash::RandomState>,
    old: HashMap<u128, Arc<[u32]>, ahash::RandomState>,
}

impl Known {
    fn find(&mut self, key: u128) -> Option<Arc<[u32]>> {
        if let Some(ids) = self.new.get(&key) {
            return Some(ids.clone());
        }
        let ids = self.old.remove(&key)?;
        self.add(key, ids.clone());
        Some(ids)
    }

    fn add(&mut self, key: u128, ids: Arc<[u32]>) {
        let bytes = size_of_val(&*ids) + SEGMENT_BYTES;
        if bytes > self.bytes_max / 4 {
            return;
        }
        if self.bytes + bytes > self.bytes_max / 2 {
            self.old = std::mem::take(&mut self.new);
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.new.insert(key, ids);
    }
}

impl Encoder {
    /// Reads a `tokenizer.json`. `bytes_max`: of segments remembered.
    ///
    /// # Errors
    /// The file cannot be read, or is no tokenizer.
    pub fn open(path: &Path, bytes_max: usize) -> Result<Encoder, String> {
        let tokenizer =
            Tokenizer::from_file(path).map_err(|e| format!("{}: {e}", path.display()))?;
        Encoder::new(tokenizer, bytes_max).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Of a tokenizer that is there.
    ///
    /// # Errors
    /// It cannot be used without cutting texts off.
    pub fn new(mut tokenizer: Tokenizer, bytes_max: usize) -> Result<Encoder, String> {
        // As engines use it: neither cut off nor filled up.
        tokenizer
            .with_truncation(None)
            .map_err(|e| e.to_string())?
            .with_padding(None);
        let clean = clean_tokens(&tokenizer);
        let cuts = (!clean.is_empty()).then(|| {
            AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(&clean)
        });
        let cuts = cuts.transpose().map_err(|e| e.to_string())?;
        Ok(Encoder {
            around: around(&tokenizer),
            tokenizer,
            cuts,
            known: Mutex::new(Known {
                bytes_max,
                bytes: 0,
                new: HashMap::default(),
                old: HashMap::default(),
            }),
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ids of a text in `ids` (cleared first): how many of them had to be made. `has_specials`: with what the model's
    /// tokenizer puts round a text, the begin token for example.
    ///
    /// # Errors
    /// The tokenizer cannot take this text.
    pub fn encode(
        &self,
        text: &str,
        has_specials: bool,
        ids: &mut Vec<u32>,
    ) -> Result<usize, String> {
        ids.clear();
        let (before, after): (&[u32], &[u32]) = match (&self.around, has_specials) {
            (Some((before, after)), true) => (before, after),
            (None, true) => {
                ids.extend(self.whole(text, true)?);
                return Ok(ids.len());
            }
            (_, false) => (&[], &[]),
        };
        ids.extend_from_slice(before);
        let mut made = 0;
        let mut start = 0;
        let cuts = self.cuts.iter().flat_map(|cuts| cuts.find_iter(text));
        for end in cuts.map(|found| found.start()).chain([text.len()]) {
            if end > start {
                made += self.segment(&text[start..end], start == 0, ids)?;
                start = end;
            }
        }
        ids.extend_from_slice(after);
        Ok(made)
    }

    fn segment(&self, text: &str, is_first: bool, ids: &mut Vec<u32>) -> Result<usize, String> {
        let key = xxh3_128_with_seed(text.as_bytes(), u64::from(is_first));
        let found = self.known().find(key);
        if let Some(found) = found {
            ids.extend_from_slice(&found);
            return Ok(0);
        }
        let made: Arc<[u32]> = self.whole(text, false)?.into();
        ids.extend_from_slice(&made);
        self.known().add(key, made.clone());
        Ok(made.len())
    }

    fn whole(&self, text: &str, has_specials: bool) -> Result<Vec<u32>, String> {
        let encoding = self.tokenizer.encode_fast(text, has_specials);
        let encoding = encoding.map_err(|e| e.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// The tokens at which a text may be cut.
fn clean_tokens(tokenizer: &Tokenizer) -> Vec<String> {
    let tokens = tokenizer.get_added_tokens_decoder();
    let raw: Vec<&AddedToken> = tokens
        .values()
        .filter(|token| !token.normalized && !token.content.is_empty())
        .collect();
    // A word that must stand alone looks at what stands before it, over the cut.
    if tokens.values().any(|token| token.single_word) {
        return Vec::new();
    }
    let is_clean = |token: &&&AddedToken| {
        let begins_with_space = token.content.starts_with(char::is_whitespace);
        !begins_with_space && raw.iter().all(|other| leaves_begin_alone(token, other))
    };
    let clean = raw.iter().filter(is_clean);
    clean.map(|token| token.content.clone()).collect()
}

/// Whether `other` cannot lie over the first byte of `token` without beginning there, and takes nothing along if it does.
fn leaves_begin_alone(token: &AddedToken, other: &AddedToken) -> bool {
    let (token, text) = (token.content.as_bytes(), other.content.as_bytes());
    let overlaps = |from: usize| {
        let rest = &text[from..];
        rest.starts_with(token) || token.starts_with(rest)
    };
    let lies_over = (1..text.len()).any(overlaps);
    let begins_there = text.starts_with(token);
    let takes_along = begins_there && other.lstrip;
    !lies_over && !takes_along
}

/// What is put before and behind a text. `None`: that cannot be told from the text.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let ids = |text: &str, has_specials| {
        let encoding = tokenizer.encode_fast(text, has_specials).ok()?;
        Some(encoding.get_ids().to_vec())
    };
    let around_of = |text: &str| {
        let (bare, full) = (ids(text, false)?, ids(text, true)?);
        let before = full.windows(bare.len().max(1)).position(|w| w == bare)?;
        let after = full[before + bare.len()..].to_vec();
        Some((full[..before].to_vec(), after))
    };
    let found = around_of("Who is it?")?;
    (around_of("12 a\n b")? == found).then_some(found)
}

#[cfg(test)]
#[path = "encode_tests.rs"]
mod tests;
