//! Keys as they are kept and compared, and the file of clients' keys.
//!
//! # What the time of an answer tells
//!
//! A key is never compared with what a request brings; its digest is: SHA-256 of 32 random bytes of this process and the
//! key. Who guesses cannot know how near a guess's digest is to any other, since the random bytes are known to nobody and
//! end with the process. So a search over sorted digests, whose time depends on them, says nothing that brings the
//! next guess closer. Digests themselves are compared whole (`subtle`), found or not. What is left is the length of what was
//! sent, which the sender knows.
//!
//! # The file
//!
//! A line is `key` or `name:key`; what begins with `#`, and what is empty, is skipped. The name is for whoever reads the
//! file. Messages give the number of a line, never its text: a key may stand where a name belongs.

use std::collections::HashMap;
use std::fmt;
use std::sync::LazyLock;

use sha2::Digest as _;
use subtle::ConstantTimeEq;

/// Longest key; no more than fits well into a header field.
pub const KEY_BYTES_MAX: usize = 1024;
/// Longest name.
const NAME_BYTES_MAX: usize = 128;

/// Without random bytes there is no safe way to compare, and no Linux that runs us lacks them.
static SALT: LazyLock<[u8; 32]> = LazyLock::new(|| {
    let mut salt = [0; 32];
    getrandom::fill(&mut salt).expect("the kernel gives random bytes");
    salt
});

/// What is kept of a key. Two of the same key are equal within a process, in no other.
#[derive(Clone, Copy)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Of a key.
    pub fn of(key: &[u8]) -> Digest {
        let mut hash = sha2::Sha256::new();
        hash.update(*SALT);
        hash.update(key);
        Digest(hash.finalize().into())
    }

    #[cfg(test)]
    pub(super) fn to_bytes(self) -> [u8; 32] {
        self.0
    }

    #[cfg(test)]
    pub(super) fn from_bytes(bytes: [u8; 32]) -> Digest {
        Digest(bytes)
    }

    fn head(&self) -> u64 {
        let first = self.0.first_chunk().expect("32 bytes have a first 8");
        u64::from_be_bytes(*first)
    }
}

/// In a time that does not depend on the digests.
impl PartialEq for Digest {
    fn eq(&self, other: &Digest) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Digest {}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A set of keys, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyTable {
    sorted: std::sync::Arc<[Digest]>,
}

impl KeyTable {
    /// Of these keys; the same twice is one. `None`: there is none.
    pub fn new(digests: impl IntoIterator<Item = Digest>) -> Option<KeyTable> {
        let mut sorted: Vec<Digest> = digests.into_iter().collect();
        sorted.sort_unstable_by_key(|digest| digest.0);
        sorted.dedup();
        let is_empty = sorted.is_empty();
        (!is_empty).then(|| KeyTable {
            sorted: sorted.into(),
        })
    }

    /// Whether one of them has this digest.
    pub fn holds(&self, digest: &Digest) -> bool {
        let from = self.sorted.partition_point(|d| d.head() < digest.head());
        let like = self.sorted[from..].iter();
        // All that begin alike, hit or not; that there is more than one is as good as impossible.
        let like = like.take_while(|d| d.head() == digest.head());
        like.fold(false, |found, d| found | (d == digest))
    }

    /// How many.
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.sorted.len()
    }
}

/// Why a key cannot be, without showing it. It must fit into a header field.
///
/// # Errors
/// It is empty, too long, or has a byte that does not go there.
pub fn check(key: &str) -> Result<(), &'static str> {
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()) {
        Err("must be printable ASCII without spaces")
    } else if key.len() > KEY_BYTES_MAX {
        Err("must be at most 1024 bytes long")
    } else {
        Ok(())
    }
}

/// Reads the text of a file of clients' keys.
///
/// # Errors
/// The first line that cannot be, by its number; or there is no key at all, as in a file that is being written.
pub fn parse(text: &str) -> Result<Vec<Digest>, String> {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut digests = Vec::new();
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let key = key_of(line).map_err(|why| format!("line {number}: {why}"))?;
        if let Some(first) = seen.insert(key, number) {
            return Err(format!("line {number}: the same key as in line {first}"));
        }
        digests.push(Digest::of(key.as_bytes()));
    }
    if digests.is_empty() {
        return Err("holds no key".to_owned());
    }
    Ok(digests)
}

fn key_of(line: &str) -> Result<&str, String> {
    let Some((name, key)) = line.split_once(':') else {
        return check(line)
            .map(|()| line)
            .map_err(|why| format!("the key {why}"));
    };
    let (name, key) = (name.trim_end(), key.trim_start());
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"._-@+".contains(&b);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_plain) {
        return Err(
            "the name in front of ':' must be 1 to 128 letters, digits or ._-@+".to_owned(),
        );
    }
    check(key)
        .map(|()| key)
        .map_err(|why| format!("the key {why}"))
}
