//! A file of decisions, as far as it can be read.

use super::record::{
    self, Decided, Ended, FRAME_BYTES, Header, KIND_DECIDED, KIND_ENDED, KIND_HEADER, KIND_WORKER,
    MAGIC, WorkerRow,
};
use super::sketch::Sketch;

/// What of a file could not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Where the first of it begins, in bytes.
    pub from: u64,
    /// How many bytes in all.
    pub bytes: u64,
}

/// What a file says. Each record with the run it is of: numbers of exchanges and slots mean something within one only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFile {
    /// Runs in the order in which they begin; a run may begin again, in another file.
    pub headers: Vec<Header>,
    /// Who stood in which slot.
    pub workers: Vec<WorkerRow>,
    /// What was decided.
    pub decisions: Vec<(u32, Decided, Sketch)>,
    /// What came of it.
    pub ends: Vec<(u32, Ended)>,
    /// Bytes that say nothing; `None`: there are none.
    pub damage: Option<Damage>,
}

/// Reads all whole records (D1). After a damaged one it goes on with the next header.
pub fn read(bytes: &[u8]) -> LogFile {
    let mut file = LogFile::default();
    let mut at = 0;
    let mut is_in_run = false;
    while at < bytes.len() {
        let taken = record::raw(&bytes[at..]).filter(|raw| is_in_run || raw.kind == KIND_HEADER);
        let taken = taken.filter(|raw| file.take(raw).is_some());
        if let Some(raw) = taken {
            is_in_run = true;
            at += raw.len;
            continue;
        }
        is_in_run = false;
        let next = next_header(bytes, at + 1).unwrap_or(bytes.len());
        let damage = file.damage.get_or_insert(Damage {
            from: at as u64,
            bytes: 0,
        });
        damage.bytes += (next - at) as u64;
        at = next;
    }
    file
}

/// Where the next header may begin.
fn next_header(bytes: &[u8], from: usize) -> Option<usize> {
    let search = from + FRAME_BYTES;
    let found = memchr::memmem::find(bytes.get(search..)?, MAGIC)?;
    Some(search + found - FRAME_BYTES)
}

impl LogFile {
    fn take(&mut self, raw: &record::Raw<'_>) -> Option<()> {
        let (run, content) = (raw.run, raw.content);
        match raw.kind {
            KIND_HEADER => self.headers.push(record::header(run, content)?),
            KIND_WORKER => self.workers.push(record::worker(run, content)?),
            KIND_DECIDED => {
                let (decided, sketch) = record::decided(content)?;
                self.decisions.push((run, decided, sketch));
            }
            KIND_ENDED => self.ends.push((run, record::ended(content)?)),
            _ => return None,
        }
        Some(())
    }
}
