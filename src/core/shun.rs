//! Workers that one core leaves alone for a while: those it could not reach, and those that said they have no room. Advice:
//! where nobody else is, they are asked all the same.

use shards::Slot;

/// How long a core leaves a worker alone that it could not reach; the control thread judges it meanwhile.
const REFUSED_NS: u64 = 1_000_000_000;
/// How long it leaves one alone that has no room: 429 or 503 say nothing against a worker, but asking it again at once
/// would cost a retry each time.
const BUSY_NS: u64 = 50_000_000;
/// The longest pause that a worker may ask for by `Retry-After`: a stranger's number must not take it out.
const BUSY_NS_MAX: u64 = 10_000_000_000;

/// Those workers, and until when.
#[derive(Default)]
pub struct Shunned {
    /// One entry a worker, as in an overload thousands of answers a second say so.
    until_ns: Vec<(Slot, u64)>,
}

impl Shunned {
    /// It could not be reached.
    pub fn refused(&mut self, slot: Slot, now_ns: u64) {
        self.add(slot, now_ns + REFUSED_NS);
    }

    /// It has no room, for so many seconds (0: it did not say).
    pub fn busy(&mut self, slot: Slot, secs: u32, now_ns: u64) {
        let pause_ns = u64::from(secs) * 1_000_000_000;
        self.add(slot, now_ns + pause_ns.clamp(BUSY_NS, BUSY_NS_MAX));
    }

    fn add(&mut self, slot: Slot, until_ns: u64) {
        let mut all = self.until_ns.iter_mut();
        match all.find(|(shunned, _)| *shunned == slot) {
            Some((_, until)) => *until = until_ns.max(*until),
            None => self.until_ns.push((slot, until_ns)),
        }
    }

    /// Whether there is none, those aside whose time is over and was not looked at.
    pub fn is_empty(&self) -> bool {
        self.until_ns.is_empty()
    }

    /// Those of now.
    pub fn slots(&mut self, now_ns: u64) -> impl Iterator<Item = Slot> {
        self.until_ns.retain(|(_, until_ns)| *until_ns > now_ns);
        self.until_ns.iter().map(|(slot, _)| *slot)
    }
}
