//! Files that flags name and that are read again when they change.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What tells a file from the one that was there before: another file, or other content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    changed: (i64, i64),
}

impl Stamp {
    /// Of what is there now; `None`: it cannot be looked at.
    pub fn now(path: &Path) -> Option<Stamp> {
        let found = std::fs::metadata(path);
        found.ok().map(|found| Stamp::of(&found))
    }

    fn of(found: &std::fs::Metadata) -> Stamp {
        Stamp {
            device: found.dev(),
            inode: found.ino(),
            len: found.len(),
            // Not when it was written last: that can be set to what it was.
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }
}

/// Reads a file of at most `bytes_max` bytes, and says what it was from there on: a change meanwhile is seen later.
///
/// # Errors
/// In words: it cannot be read, or is larger.
pub(super) fn read(path: &Path, bytes_max: u64) -> Result<(Vec<u8>, Stamp), String> {
    let cannot = |e: std::io::Error| format!("cannot be read: {e}");
    let file = std::fs::File::open(path).map_err(cannot)?;
    let stamp = Stamp::of(&file.metadata().map_err(cannot)?);
    let mut bytes = Vec::new();
    let mut limited = file.take(bytes_max + 1);
    limited.read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > bytes_max {
        return Err(format!("is larger than {bytes_max} bytes"));
    }
    Ok((bytes, stamp))
}
