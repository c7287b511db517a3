//! The last decisions of one core, to be asked about. Owned by the core; others ask it by its inbox.

use super::record::{Decided, Ended};

/// A decision, and what came of it so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// What was decided.
    pub decided: Decided,
    /// What its worker did; `None`: nothing yet, or nothing that says anything of it.
    pub result: Option<&'static str>,
    /// How the exchange ended; stands with its last decision.
    pub ended: Option<Ended>,
}

/// The ring.
#[derive(Debug, Default)]
pub struct Recent {
    capacity: usize,
    /// What each was asked for by, apart: a search touches nothing else.
    requests: Vec<u64>,
    all: Vec<Remembered>,
    /// Decisions since the start.
    count: u64,
}

impl Recent {
    /// Room for that many; 0: none is kept.
    pub fn new(capacity: usize) -> Recent {
        Recent {
            capacity,
            requests: Vec::with_capacity(capacity),
            all: Vec::with_capacity(capacity),
            count: 0,
        }
    }

    /// Adds a decision, in place of the oldest; its number for [`Recent::find`].
    #[inline]
    pub fn add(&mut self, decided: &Decided) -> u64 {
        let number = self.count;
        self.count += 1;
        if self.capacity == 0 {
            return number;
        }
        let remembered = Remembered {
            decided: *decided,
            result: None,
            ended: None,
        };
        if self.all.len() < self.capacity {
            self.requests.push(decided.request);
            self.all.push(remembered);
        } else {
            let place = (number % self.capacity as u64) as usize;
            self.requests[place] = decided.request;
            self.all[place] = remembered;
        }
        number
    }

    /// The decision of that number, if it is still known.
    pub fn find(&mut self, number: u64) -> Option<&mut Remembered> {
        let is_known = number < self.count && self.count - number <= self.all.len() as u64;
        is_known.then(|| &mut self.all[(number % self.capacity as u64) as usize])
    }

    /// All that is known of a request, oldest first.
    pub fn recall(&self, request: u64) -> Vec<Remembered> {
        let oldest = match self.all.len() < self.capacity {
            true => 0,
            false if self.capacity == 0 => return Vec::new(),
            false => (self.count % self.capacity as u64) as usize,
        };
        let places = (oldest..self.all.len()).chain(0..oldest);
        let found = places.filter(|place| self.requests[*place] == request);
        found.map(|place| self.all[place]).collect()
    }
}
