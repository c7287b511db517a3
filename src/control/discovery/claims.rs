//! What one way of finding workers says is there, and what has become of it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::super::Plane;
use super::super::registry::{AddError, Finder, Key};
use super::Stats;
use crate::config::WorkerSpec;

/// A worker that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// What makes it another one though all else is the same: a pod's uid. Empty: nothing.
    pub(super) id: String,
    /// Where, and what it does.
    pub(super) spec: WorkerSpec,
    /// Whether it may get requests. One that never could is not registered.
    pub(super) is_ready: bool,
}

impl Found {
    /// Two of the same name are the same worker.
    fn name(&self) -> String {
        let WorkerSpec {
            url,
            role,
            bootstrap_port,
        } = &self.spec;
        let (id, role, port) = (&self.id, role.label(), bootstrap_port.unwrap_or(0));
        format!("{id} {role} {port} {}", url.canonical())
    }
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Not ready so far.
    Waits,
    /// Why it is not registered; tried again.
    Refused(String),
    /// An operator may have removed it since.
    Registered(Key),
}

#[derive(Debug)]
struct Held {
    found: Found,
    state: State,
}

/// All that one finder has found.
#[derive(Debug)]
pub(super) struct Claims {
    finder: Finder,
    held: HashMap<String, Held>,
}

impl Claims {
    /// None so far.
    pub(super) fn new(finder: Finder) -> Claims {
        Claims {
            finder,
            held: HashMap::new(),
        }
    }

    /// Whether there is somebody to call [`Claims::retry`] for.
    #[cfg(feature = "kubernetes")]
    pub(super) fn has_refused(&self) -> bool {
        let mut all = self.held.values();
        all.any(|held| matches!(held.state, State::Refused(_)))
    }

    /// This, and nothing else, is there now. Of several of the same name the first counts.
    pub(super) fn update(&mut self, plane: &Arc<Plane>, found: Vec<Found>) {
        let found: Vec<(String, Found)> = found.into_iter().map(|f| (f.name(), f)).collect();
        let names: HashSet<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        // First who leaves: his address may be another's now.
        let gone = self
            .held
            .extract_if(|name, _| !names.contains(name.as_str()));
        for (_, held) in gone {
            if let State::Registered(key) = held.state {
                plane.release(key, self.finder);
                stats(plane, self.finder).count_removed();
            }
        }
        for (name, found) in found {
            match self.held.get_mut(&name) {
                None => {
                    let mut held = Held {
                        found,
                        state: State::Waits,
                    };
                    settle(plane, self.finder, &mut held);
                    self.held.insert(name, held);
                }
                Some(held) if held.found.is_ready != found.is_ready => {
                    held.found.is_ready = found.is_ready;
                    match held.state {
                        State::Registered(key) => {
                            plane.registry().claim(key, self.finder, found.is_ready);
                            plane.announce_change();
                        }
                        _ => settle(plane, self.finder, held),
                    }
                }
                Some(_) => {}
            }
        }
    }

    /// Tries again to register what was refused.
    pub(super) fn retry(&mut self, plane: &Arc<Plane>) {
        for held in self.held.values_mut() {
            if matches!(held.state, State::Refused(_)) {
                settle(plane, self.finder, held);
            }
        }
    }
}

fn stats(plane: &Plane, finder: Finder) -> &Stats {
    plane.discovery.stats(finder)
}

/// Registers one that is not yet, or says that one who is registered is found here too.
fn settle(plane: &Arc<Plane>, finder: Finder, held: &mut Held) {
    let state = match try_register(plane, finder, &held.found) {
        Ok(Some(key)) => {
            stats(plane, finder).count_added();
            State::Registered(key)
        }
        Ok(None) => State::Waits,
        Err(reason) => State::Refused(reason),
    };
    if let State::Refused(reason) = &state
        && held.state != state
    {
        stats(plane, finder).count_error();
        let (worker, source) = (&held.found.spec.url, finder.label());
        tracing::error!(%worker, source, reason, "worker found, but not registered");
    }
    held.state = state;
}

/// `None`: not while it is not ready.
fn try_register(plane: &Arc<Plane>, finder: Finder, found: &Found) -> Result<Option<Key>, String> {
    let spec = &found.spec;
    if let Some(reason) = plane.misfit(spec.role) {
        return Err(reason);
    }
    let known = {
        let registry = plane.registry();
        let entry = registry.find(&spec.url);
        entry.map(|entry| (entry.key, entry.role, entry.is_as_listed(spec)))
    };
    match known {
        Some((key, _, true)) => {
            plane.registry().claim(key, finder, found.is_ready);
            Ok(Some(key))
        }
        Some((_, role, false)) => {
            let role = role.label();
            Err(format!(
                "it is registered as another {role} worker: remove that one first"
            ))
        }
        None if !found.is_ready => Ok(None),
        None => match plane.add(spec.clone(), finder) {
            Ok(key) => {
                let (worker, role, source) = (&spec.url, spec.role.label(), finder.label());
                tracing::info!(%worker, role, source, "worker found");
                Ok(Some(key))
            }
            Err(AddError::Exists) => Err("it is registered already".to_owned()),
            Err(AddError::Full) => Err("no room for another worker".to_owned()),
        },
    }
}
