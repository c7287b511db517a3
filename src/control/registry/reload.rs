//! What another configuration changes about the workers.
//!
//! - F4 a reload takes away only workers that the configuration alone had brought: those added by an operator, engines that
//!   registered themselves, and what discovery finds, stay. It brings back nobody whom an operator removed, as long as the lists say the same of him.

use super::{Entry, Finder, Key, Registry};
use crate::config::{BOOTSTRAP_PORT, Config, WORKER_COUNT_MAX, WorkerSpec};
use crate::route::Role;

/// What is to be done, in this order.
#[derive(Debug, Default)]
pub struct Plan {
    /// Listed no more.
    pub removed: Vec<Key>,
    /// There already, and listed now: from now on the configuration's, and no more an operator's.
    pub adopted: Vec<Key>,
    /// Listed newly.
    pub added: Vec<WorkerSpec>,
}

impl Registry {
    /// Compares the lists of two configurations, and them with the workers there are. Changes nothing.
    ///
    /// # Errors
    /// In words: a listed worker is registered as something else, or there is no room for all.
    pub fn plan(&self, old: &Config, new: &Config) -> Result<Plan, String> {
        let mut plan = Plan::default();
        for spec in old.workers.iter().filter(|&old| !new.workers.contains(old)) {
            let entry = self
                .find(&spec.url)
                .filter(|entry| entry.finders.has(Finder::Static));
            plan.removed.extend(entry.map(|entry| entry.key));
        }
        for spec in new.workers.iter().filter(|&new| !old.workers.contains(new)) {
            let stays = |entry: &&Entry| {
                !plan.removed.contains(&entry.key) || !entry.finders.is_only(Finder::Static)
            };
            match self.find(&spec.url).filter(stays) {
                None => plan.added.push(spec.clone()),
                Some(entry) if !entry.is_as_listed(spec) => {
                    return Err(format!(
                        "worker {} is registered as another {} worker: remove it first",
                        spec.url,
                        entry.role.label()
                    ));
                }
                // An engine that registered itself goes when it is silent, listed or not.
                Some(entry) if entry.has_lease() => {}
                Some(entry) => plan.adopted.push(entry.key),
            }
        }
        self.check_room(&plan)?;
        Ok(plan)
    }

    fn check_room(&self, plan: &Plan) -> Result<(), String> {
        let ranks = self.shared.config().data_parallel_size as usize;
        let wanted = plan.added.len() * ranks;
        let gone = plan.removed.iter().filter_map(|key| self.entry(*key));
        let gone = gone.filter(|entry| entry.finders.is_only(Finder::Static));
        let gone: usize = gone.map(|entry| entry.ranks.len()).sum();
        if self.worker_count() + wanted > WORKER_COUNT_MAX + gone {
            return Err(format!(
                "no room: at most {WORKER_COUNT_MAX} workers, data-parallel ranks counted"
            ));
        }
        if wanted > self.free.len() {
            return Err("no room until removed workers have finished their requests".to_owned());
        }
        Ok(())
    }

    /// Other settings for those who keep a copy: thresholds of probes, and the judge of workers that fail.
    pub fn configure(&mut self, config: &Config) {
        self.standings
            .configure(config.standing, config.health.interval);
        for entry in &mut self.entries {
            entry.tracker.configure(&config.health);
        }
        let rings = rings(config);
        if rings != self.has_rings || config.tls != self.tls {
            self.has_rings = rings;
            self.tls = config.tls.clone();
            self.publish();
        }
    }

    /// The configuration lists a worker that an operator had added, or discovery had found.
    pub fn adopt(&mut self, key: Key) {
        self.claim(key, Finder::Static, true);
        self.release(key, Finder::Api);
    }
}

/// By role: whether its policy walks a ring.
pub(super) fn rings(config: &Config) -> [bool; 3] {
    Role::ALL.map(|role| config.settings_of(role).policy.uses_ring())
}

impl Entry {
    /// Whether it is what a list says of its URL.
    pub fn is_as_listed(&self, spec: &WorkerSpec) -> bool {
        let port = spec.bootstrap_port.unwrap_or(BOOTSTRAP_PORT);
        self.role == spec.role
            && (spec.role != Role::Prefill || self.bootstrap_port == Some(port) || self.has_lease())
    }
}
