//! The registry without I/O: probes are values, time does not pass.

use shards::LoadGuard;

use super::super::testing::{Parts, Told, config, parts, pump};
use super::*;
use crate::config::Config;
use crate::control::models;
use crate::route::Role;

const ADDRESS: &str = "10.0.0.1:8000";

struct Rig {
    parts: Parts,
    registry: Registry,
}

fn rig(core_count: usize, slot_count: usize) -> Rig {
    let mut config = config();
    (
        config.health.failure_threshold,
        config.health.success_threshold,
    ) = (3, 2);
    let mut parts = parts(config, core_count, slot_count);
    let registry = Registry::new(parts.shared.clone(), parts.publisher.take().unwrap());
    Rig { parts, registry }
}

impl Rig {
    fn add(&mut self, url: &str) -> Key {
        self.registry
            .add(WorkerUrl::parse(url).unwrap(), Finder::Static)
            .unwrap()
    }

    fn good(&mut self, key: Key) -> Applied {
        self.good_at(key, ADDRESS, None)
    }

    fn good_at(&mut self, key: Key, address: &str, models: Option<&str>) -> Applied {
        let models = models.map(|text| models::parse(text.as_bytes()));
        self.registry
            .apply(
                key,
                Probed {
                    outcome: Ok(address.parse().unwrap()),
                    models,
                    rank_count: None,
                },
            )
            .unwrap()
    }

    fn bad(&mut self, key: Key, failure: Failure) -> Applied {
        self.registry
            .apply(
                key,
                Probed {
                    outcome: Err(failure),
                    models: None,
                    rank_count: None,
                },
            )
            .unwrap()
    }

    fn id(&self, key: Key) -> WorkerId {
        self.registry.entry(key).unwrap().ranks[0].id
    }

    fn eligible(&mut self) -> Vec<(String, WorkerId)> {
        let pin = self.parts.reader.pin();
        self.parts
            .shared
            .fleet
            .load(&pin)
            .eligible
            .iter()
            .map(|w| (w.url.to_string(), w.id))
            .collect()
    }

    fn guard(&self, id: WorkerId) -> LoadGuard {
        LoadGuard::acquire(self.parts.shared.books, id, 100).expect("open")
    }

    fn totals(&self, key: Key) -> Totals {
        self.registry
            .totals(&self.registry.entry(key).unwrap().ranks[0])
    }

    fn in_flight(&self, id: WorkerId) -> u32 {
        self.parts.shared.books.in_flight(id.slot)
    }
}

/// Load is the exchanges' alone: 30 good cycles, 12 failing ones, and both changes of state leave every count as it is.
#[test]
fn health_never_touches_load() {
    let mut rig = rig(1, 8);
    let (a, b) = (rig.add("http://a:1"), rig.add("http://b:1"));
    rig.good(a);
    rig.good(b);
    let id = rig.id(a);
    let guards: Vec<LoadGuard> = (0..7).map(|_| rig.guard(id)).collect();
    let other = rig.guard(rig.id(b));
    for _ in 0..30 {
        rig.good(a);
        rig.registry.sweep();
        assert_eq!(rig.in_flight(id), 7);
    }
    for cycle in 0..12 {
        let applied = rig.bad(a, [Failure::Timeout, Failure::Status(503)][cycle % 2]);
        assert_eq!(
            applied.phase == Phase::Unhealthy,
            cycle >= 2,
            "cycle {cycle}"
        );
        assert_eq!(rig.in_flight(id), 7, "cycle {cycle}");
    }
    assert_eq!(rig.eligible().len(), 1);
    rig.good(a);
    assert_eq!(rig.good(a).phase, Phase::Ready);
    assert_eq!(
        (rig.id(a), rig.in_flight(id)),
        (id, 7),
        "after time-outs and 5xx it is the same life"
    );
    drop(guards);
    assert_eq!((rig.in_flight(id), rig.in_flight(other.worker())), (0, 1));
    assert_eq!(rig.parts.shared.books.underflow_count(), 0);
}

#[test]
fn a_process_that_was_gone_returns_in_a_new_slot() {
    let mut rig = rig(2, 8);
    let key = rig.add("http://a:1");
    rig.good(key);
    let old = rig.id(key);
    let guard = rig.guard(old);
    for _ in 0..3 {
        rig.bad(key, Failure::Refused);
    }
    assert!(rig.eligible().is_empty());
    rig.good(key);
    rig.good(key);
    let new = rig.id(key);
    assert_ne!(old.slot, new.slot);
    assert_eq!(rig.eligible(), [("http://a:1".to_owned(), new)]);
    assert_eq!(
        (rig.in_flight(old), rig.in_flight(new)),
        (1, 0),
        "the old life's requests stay its own"
    );
    assert!(
        LoadGuard::acquire(rig.parts.shared.books, old, 0).is_none(),
        "closed"
    );

    // Not forgotten before it is drained, not free before every core has said so.
    let mut told = Told::default();
    assert!(rig.registry.sweep());
    pump(&rig.parts.shared, &mut told);
    assert!(told.purged.is_empty());
    drop(guard);
    rig.registry.sweep();
    rig.parts.shared.cores[0].purged.push(old.slot);
    assert!(rig.registry.sweep(), "core 1 has not said so");
    rig.parts.shared.cores[1].purged.push(old.slot);
    assert!(!rig.registry.sweep());
    pump(&rig.parts.shared, &mut told);
    assert_eq!(told.purged, [old.slot.0; 2]);
    assert!(rig.registry.free.contains(&old.slot));
}

#[test]
fn another_address_is_another_process() {
    let mut rig = rig(1, 8);
    let key = rig.add("http://name:1");
    rig.good_at(key, "10.0.0.1:1", None);
    let old = rig.id(key);
    rig.good_at(key, "10.0.0.1:1", None);
    assert_eq!(rig.id(key), old);
    rig.good_at(key, "10.0.0.2:1", None);
    assert_ne!(rig.id(key).slot, old.slot);
    let pin = rig.parts.reader.pin();
    assert_eq!(
        rig.parts.shared.fleet.load(&pin).eligible[0]
            .address
            .to_string(),
        "10.0.0.2:1"
    );
}

#[test]
fn removal_drains_and_the_same_url_can_come_back_at_once() {
    let mut rig = rig(1, 8);
    let first = rig.add("http://a:1");
    rig.good(first);
    let old = rig.id(first);
    let guard = rig.guard(old);
    assert_eq!(
        rig.registry
            .add(WorkerUrl::parse("http://a:1/").unwrap(), Finder::Api),
        Err(AddError::Exists)
    );
    assert!(rig.registry.remove(first) && !rig.registry.remove(first));
    assert!(rig.eligible().is_empty() && rig.registry.entry(first).is_none());
    assert!(LoadGuard::acquire(rig.parts.shared.books, old, 0).is_none());
    assert!(
        rig.registry
            .apply(
                first,
                Probed {
                    outcome: Ok(ADDRESS.parse().unwrap()),
                    models: None,
                    rank_count: None,
                }
            )
            .is_none()
    );

    let second = rig.add("http://a:1");
    rig.good(second);
    let new = rig.id(second);
    assert_ne!(old.slot, new.slot);
    let fresh = rig.guard(new);
    drop(guard);
    assert_eq!(
        (rig.in_flight(old), rig.in_flight(new)),
        (0, 1),
        "the old stream's end is not the new entry's"
    );
    drop(fresh);
}

/// 500 lives on 4 slots: every slot comes back, and no two lives share one.
#[test]
fn slots_are_reused_without_end() {
    let mut rig = rig(2, 4);
    let mut told = Told::default();
    for round in 0..500 {
        let key = rig.add("http://a:1");
        let other = rig.add("http://b:1");
        assert_ne!(rig.id(key).slot, rig.id(other).slot);
        rig.registry.remove(key);
        rig.registry.remove(other);
        while rig.registry.sweep() {
            pump(&rig.parts.shared, &mut told);
        }
        assert_eq!(rig.registry.free.len(), 4, "round {round}");
    }
    // Without cores that answer, slots run out, and adding says so.
    let keys: Vec<Key> = (0..4).map(|n| rig.add(&format!("http://w{n}:1"))).collect();
    assert_eq!(
        rig.registry
            .add(WorkerUrl::parse("http://x:1").unwrap(), Finder::Api),
        Err(AddError::Full)
    );
    rig.registry.remove(keys[0]);
    rig.registry.sweep();
    assert_eq!(
        rig.registry
            .add(WorkerUrl::parse("http://x:1").unwrap(), Finder::Api),
        Err(AddError::Full)
    );
}

#[test]
fn the_fleet_tells_models_of_all_and_candidates_of_the_ready() {
    let mut rig = rig(1, 8);
    let (a, b, c) = (
        rig.add("http://a:1"),
        rig.add("http://b:1/x/"),
        rig.add("http://c:1"),
    );
    rig.good_at(a, ADDRESS, Some(r#"{"data":[{"id":"m1"},{"id":"m2"}]}"#));
    rig.good_at(b, ADDRESS, Some(r#"{"data":[{"id":"m2"}]}"#));
    rig.good_at(c, ADDRESS, Some("junk"));
    for _ in 0..3 {
        rig.bad(a, Failure::Timeout);
    }
    let slots = [rig.id(b).slot, rig.id(c).slot];
    let pin = rig.parts.reader.pin();
    let fleet = rig.parts.shared.fleet.load(&pin);
    assert_eq!(fleet.pool(Role::Regular).any.slots(), slots);
    assert_eq!(fleet.registered_count, 3);
    assert_eq!(
        fleet.pool(Role::Regular).by_model["m1"].slots(),
        [slots[1]],
        "only the worker of unknown models is left for m1"
    );
    assert_eq!(fleet.pool(Role::Regular).by_model["m2"].slots(), slots);
    assert_eq!(
        fleet.pool(Role::Regular).of_unknown_models.slots(),
        [slots[1]]
    );
    assert!(fleet.known_models.contains("m1"));
    let worker = fleet.worker(slots[0]).unwrap();
    assert_eq!(
        (&*worker.url, &*worker.authority, &*worker.path_prefix),
        ("http://b:1/x", "b:1", "/x")
    );
}

#[test]
fn model_lists_are_asked_for_at_start_on_recovery_and_with_every_third_probe() {
    let mut rig = rig(1, 8);
    let key = rig.add("http://a:1");
    let mut asked = String::new();
    for probe in "++++++++ttt++++".chars() {
        let wants = rig.registry.wants_models(key);
        match probe {
            '+' => {
                asked.push(if wants { 'M' } else { '-' });
                rig.good(key);
            }
            _ => {
                rig.bad(key, Failure::Timeout);
            }
        }
    }
    // Eight good ones, then the second after the failures is the recovery.
    assert_eq!(asked, "M-M--M--MM-M");
}

/// Counters of a URL only grow, whatever slots its lives had, and a slot's next worker starts at zero.
#[test]
fn totals_follow_the_url_not_the_slot() {
    let mut rig = rig(1, 2);
    let count = |rig: &Rig, id: WorkerId, n| {
        let stats = &rig.parts.shared.cores[0].stats.workers[usize::from(id.slot.0)];
        stats.chosen.add(n);
        stats.failures.add(1);
    };
    let key = rig.add("http://a:1");
    rig.good_at(key, "10.0.0.1:1", None);
    count(&rig, rig.id(key), 5);
    rig.good_at(key, "10.0.0.2:1", None);
    count(&rig, rig.id(key), 2);
    assert_eq!(rig.totals(key).chosen, 7, "one life ending, one running");
    let mut told = Told::default();
    while rig.registry.sweep() {
        pump(&rig.parts.shared, &mut told);
    }
    let totals = rig.totals(key);
    assert_eq!(
        (totals.chosen, totals.failures),
        (7, 2),
        "the first life is forgotten, its counts are not"
    );
    let other = rig.add("http://b:1");
    assert_eq!(rig.id(other).slot.0, 0, "the slot that had counted 5");
    assert_eq!(rig.totals(other), Totals::default());
}

/// On given times: a lease ends after five seconds, its worker keeps its slot and books; a process that was seen gone
/// meanwhile returns as another life; one that stays away is removed.
#[test]
fn leases_end_and_are_renewed() {
    let mut rig = rig(1, 8);
    let start = Instant::now();
    let at = |ms| start + std::time::Duration::from_millis(ms);
    let registration = Registration {
        role: Role::Prefill,
        url: WorkerUrl::parse("http://a:1").unwrap(),
        peer_address: Some("a:2".into()),
        transfer_mode: None,
        tp_size: None,
        dp_size: None,
    };
    let register = |rig: &mut Rig, ms| rig.registry.register(registration.clone(), at(ms)).unwrap();
    let Registered::New(key) = register(&mut rig, 0) else {
        panic!("new")
    };
    rig.good(key);
    let id = rig.id(key);
    assert_eq!(register(&mut rig, 4_900), Registered::Renewed);
    assert!(!rig.registry.end_leases(at(9_900)).has_changed);
    assert_eq!(rig.eligible().len(), 1);
    assert!(rig.registry.end_leases(at(9_901)).has_changed);
    assert!(!rig.registry.end_leases(at(9_902)).has_changed, "told once");
    assert!(rig.eligible().is_empty());
    let guard = rig.guard(id);
    assert_eq!(register(&mut rig, 20_000), Registered::Back);
    assert_eq!(rig.eligible(), [("http://a:1".to_owned(), id)]);
    drop(guard);

    rig.registry.end_leases(at(26_000));
    rig.bad(key, Failure::Refused);
    register(&mut rig, 30_000);
    assert_eq!(rig.eligible().len(), 1, "back at once");
    assert_ne!(rig.id(key).slot, id.slot, "as another life");

    // Out by probes as well: one good probe is enough after it has registered again.
    for _ in 0..3 {
        rig.bad(key, Failure::Timeout);
    }
    rig.registry.end_leases(at(40_000));
    register(&mut rig, 50_000);
    assert!(rig.eligible().is_empty());
    rig.good(key);
    assert_eq!(rig.eligible().len(), 1);

    let gone = rig.registry.end_leases(at(50_000 + 5_000 + 600_001)).gone;
    assert_eq!(gone, [key]);
}

/// Engines of another transfer mode, or at the address of a configured worker of another role, are refused; an address
/// that another engine took over is a new worker.
#[test]
fn registrations_must_fit() {
    let mut rig = rig(1, 8);
    let now = Instant::now();
    let registration = |url: &str, role, transfer_mode| Registration {
        role,
        url: WorkerUrl::parse(url).unwrap(),
        peer_address: None,
        transfer_mode,
        tp_size: None,
        dp_size: None,
    };
    let (read, write) = (Some(TransferMode::Read), Some(TransferMode::Write));
    let configured = rig.add("http://a:1");
    let register = |rig: &mut Rig, url, role, mode| {
        let registration = registration(url, role, mode);
        rig.registry.register(registration, now).unwrap()
    };
    assert!(matches!(
        register(&mut rig, "http://a:1", Role::Prefill, None),
        Registered::Refused(_)
    ));
    let first = register(&mut rig, "http://b:1", Role::Prefill, read);
    assert!(matches!(
        register(&mut rig, "http://c:1", Role::Decode, write),
        Registered::Refused(_)
    ));
    assert_eq!(
        register(&mut rig, "http://b:1", Role::Prefill, write),
        Registered::Renewed,
        "the only one may change it"
    );
    let second = register(&mut rig, "http://b:1", Role::Decode, write);
    assert!(matches!(second, Registered::New(_)) && second != first);
    assert_eq!(rig.registry.entries().len(), 2);
    assert!(rig.registry.entry(configured).is_some());
}

fn listing(urls: &[&str]) -> Config {
    Config {
        workers: urls
            .iter()
            .map(|url| WorkerUrl::parse(url).unwrap().into())
            .collect(),
        ..config()
    }
}

/// F4: removed is what the old list had brought, added what the new one newly lists; engines that registered themselves
/// and workers of operators are let alone.
#[test]
fn a_plan_is_the_difference_of_two_lists() {
    let mut rig = rig(1, 16);
    let keys = ["http://a:1", "http://b:1"].map(|url| rig.add(url));
    let by_operator = WorkerUrl::parse("http://c:1").unwrap();
    let by_operator = rig.registry.add(by_operator, Finder::Api).unwrap();
    let registered = Registration {
        role: Role::Regular,
        url: WorkerUrl::parse("http://d:1").unwrap(),
        peer_address: None,
        transfer_mode: None,
        tp_size: None,
        dp_size: None,
    };
    rig.registry.register(registered, Instant::now()).unwrap();
    let plan = |rig: &Rig, old: &[&str], new: &[&str]| {
        let plan = rig.registry.plan(&listing(old), &listing(new)).unwrap();
        let added: Vec<String> = plan.added.iter().map(|w| w.url.to_string()).collect();
        (plan.removed, plan.adopted, added.join(" "))
    };
    let both = ["http://a:1", "http://b:1"];
    assert_eq!(plan(&rig, &both, &both), (vec![], vec![], String::new()));
    assert_eq!(
        plan(
            &rig,
            &both,
            &["http://b:1", "http://c:1", "http://d:1", "http://e:1"]
        ),
        (vec![keys[0]], vec![by_operator], "http://e:1".to_owned())
    );
    let never_ours = ["http://a:1", "http://b:1", "http://c:1", "http://d:1"];
    assert_eq!(
        plan(&rig, &never_ours, &both),
        (vec![], vec![], String::new())
    );
    // Adopted, it is the list's.
    rig.registry.adopt(by_operator);
    assert_eq!(plan(&rig, &never_ours, &both).0, [by_operator]);
    // Removed by an operator: only a list that names it newly brings it back.
    rig.registry.remove(keys[1]);
    assert_eq!(plan(&rig, &both, &both), (vec![], vec![], String::new()));
    assert_eq!(plan(&rig, &both[..1], &both).2, "http://b:1");
}

#[test]
fn a_plan_that_does_not_fit_is_refused() {
    let mut rig = rig(1, 3);
    let key = rig.add("http://a:1");
    let guard = rig.guard(rig.id(key));
    let mut other = listing(&["http://a:1"]);
    other.workers[0].role = Role::Decode;
    let refused = rig.registry.plan(&listing(&[]), &other).unwrap_err();
    assert!(refused.contains("another regular worker"), "{refused}");
    // As the old list's it would be replaced.
    let old = listing(&["http://a:1"]);
    let plan = rig.registry.plan(&old, &other).unwrap();
    assert_eq!((plan.removed, plan.added.len()), (vec![key], 1));
    // Three slots; one drains.
    rig.registry.remove(key);
    let urls = ["http://b:1", "http://c:1", "http://d:1"];
    assert!(rig.registry.plan(&old, &listing(&urls[..2])).is_ok());
    let refused = rig.registry.plan(&old, &listing(&urls)).unwrap_err();
    assert!(refused.contains("have finished"), "{refused}");
    drop(guard);
    let many: Vec<String> = (1..=crate::config::WORKER_COUNT_MAX + 1)
        .map(|port| format!("http://z:{port}"))
        .collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(
        rig.registry
            .plan(&old, &listing(&many))
            .unwrap_err()
            .contains("at most")
    );
}
