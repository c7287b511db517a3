//! Who says that a worker is there.
//!
//! - F5 a worker stays as long as anybody says that it is there; who takes back his word takes back only his own. A worker
//!   that several find is one worker. What an operator removes is gone whoever had found it.

use super::{Key, Registry};

/// Who can say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Finder {
    /// The command line or the config file.
    Static,
    /// An operator, through the admin API.
    Api,
    /// The engine itself, by ZMQ.
    Registration,
    /// The file of `--workers-file`.
    File,
    /// A name.
    Dns,
    /// A pod.
    Kubernetes,
}

impl Finder {
    /// All, in the order of their numbers.
    pub const ALL: [Finder; 6] = [
        Finder::Static,
        Finder::Api,
        Finder::Registration,
        Finder::File,
        Finder::Dns,
        Finder::Kubernetes,
    ];

    /// In listings and metrics.
    pub fn label(self) -> &'static str {
        match self {
            Finder::Static => "static",
            Finder::Api => "api",
            Finder::Registration => "registration",
            Finder::File => "file",
            Finder::Dns => "dns",
            Finder::Kubernetes => "kubernetes",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Says {
    #[default]
    Nothing,
    Here,
    /// It is there, but is to get nothing.
    Away,
}

/// What each of them says of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Finders([Says; Finder::ALL.len()]);

impl Finders {
    /// One alone.
    pub fn of(finder: Finder) -> Finders {
        let mut finders = Finders::default();
        finders.say(finder, true);
        finders
    }

    /// Whether this one says anything.
    pub fn has(&self, finder: Finder) -> bool {
        self.0[finder as usize] != Says::Nothing
    }

    /// Whether it is the only one.
    pub fn is_only(&self, finder: Finder) -> bool {
        Finder::ALL
            .into_iter()
            .all(|other| self.has(other) == (other == finder))
    }

    /// Whether it may get requests, as far as they say.
    pub fn is_here(&self) -> bool {
        self.0.contains(&Says::Here)
    }

    /// Those that say something.
    pub fn all(&self) -> impl Iterator<Item = Finder> {
        let said = *self;
        Finder::ALL
            .into_iter()
            .filter(move |finder| said.has(*finder))
    }

    pub(super) fn say(&mut self, finder: Finder, is_here: bool) {
        self.0[finder as usize] = if is_here { Says::Here } else { Says::Away };
    }

    pub(super) fn take_back(&mut self, finder: Finder) {
        self.0[finder as usize] = Says::Nothing;
    }
}

impl Registry {
    /// `finder` says that a registered worker is there, and whether it may get requests. False: that registration is gone.
    pub fn claim(&mut self, key: Key, finder: Finder, is_here: bool) -> bool {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.key == key) else {
            return false;
        };
        let was_here = entry.finders.is_here();
        entry.finders.say(finder, is_here);
        let is_here = entry.finders.is_here();
        if was_here != is_here {
            let finder = finder.label();
            match is_here {
                true => {
                    tracing::info!(worker = %entry.url, finder, "worker may get requests again")
                }
                false => {
                    tracing::info!(worker = %entry.url, finder, "worker is said not to be ready: no new requests")
                }
            }
            self.publish();
        }
        true
    }

    /// `finder` says nothing of it any more; it goes when nobody else does. True: it is gone.
    pub fn release(&mut self, key: Key, finder: Finder) -> bool {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.key == key) else {
            return false;
        };
        let was_here = entry.finders.is_here();
        entry.finders.take_back(finder);
        if entry.finders.all().next().is_none() {
            return self.remove(key);
        }
        if entry.finders.is_here() != was_here {
            self.publish();
        }
        false
    }

    /// Workers that each of them finds, data-parallel ranks counted.
    pub fn count_by_finder(&self) -> [(Finder, usize); Finder::ALL.len()] {
        Finder::ALL.map(|finder| {
            let found = self.entries.iter();
            let found = found.filter(|entry| entry.finders.has(finder));
            (finder, found.map(|entry| entry.ranks.len()).sum())
        })
    }
}
