//! G1 to G3: never more than the limit, and nobody waits while there is room.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use shards::{Entry, Gate, Permit};

use super::{model, model_up_to};

const LIMIT: u32 = 1;

/// What the cores see besides the gate: which of them were told.
struct World {
    gate: &'static Gate,
    told: [AtomicUsize; 2],
}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            gate: Box::leak(Box::new(Gate::new(2))),
            told: [AtomicUsize::new(0), AtomicUsize::new(0)],
        })
    }

    /// The same, with one that runs.
    fn with_one_running() -> (Arc<World>, Permit) {
        let world = World::new();
        match world.gate.enter(LIMIT, 2) {
            Entry::Admitted(permit) => (world, permit),
            _ => panic!("nobody is there"),
        }
    }

    /// And one that waits on core 0, under this ticket.
    fn with_one_waiting() -> (Arc<World>, Permit, u64) {
        let (world, permit) = World::with_one_running();
        let Entry::Queued(ticket) = world.gate.enter(LIMIT, 2) else {
            panic!("there is no room");
        };
        world.gate.show(0, Some(ticket));
        (world, permit, ticket)
    }

    fn pass_on(&self) {
        while let Some(core) = self.gate.pass_on(LIMIT) {
            self.told[core].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn leave(&self, permit: Permit) {
        if permit.leave() {
            self.pass_on();
        }
    }

    /// A request on a core. True: it waits in its line.
    fn come(&self, core: usize) -> bool {
        match self.gate.enter(LIMIT, 2) {
            Entry::Admitted(permit) => {
                assert!(self.gate.counts().0 <= LIMIT, "more run than may");
                self.leave(permit);
                false
            }
            Entry::Queued(ticket) => {
                self.gate.show(core, Some(ticket));
                self.pass_on();
                true
            }
            Entry::Full => panic!("there is a place in the line"),
        }
    }

    /// What is left when all is quiet: who waits has been told, as far as there is room.
    fn settle(&self, waits: [bool; 2]) {
        let told = |core: usize| self.told[core].load(Ordering::Relaxed);
        let mut left: Vec<usize> = (0..2).filter(|core| waits[*core]).collect();
        while !left.is_empty() {
            let next = left.iter().position(|core| told(*core) > 0);
            let core = left.remove(next.expect("one waits, there is room, and nobody was told"));
            self.gate.show(core, None);
            self.leave(self.gate.take());
            self.pass_on();
        }
        assert_eq!(self.gate.counts(), (0, 0));
        assert!(
            (0..2).all(|core| told(core) == usize::from(waits[core])),
            "told in vain"
        );
    }
}

#[test]
fn one_leaves_as_another_comes() {
    model(|| {
        let (world, permit) = World::with_one_running();
        let other = world.clone();
        let thread = thread::spawn(move || other.come(1));
        world.leave(permit);
        let waits = thread.join().unwrap();
        world.settle([false, waits]);
    });
}

#[test]
fn two_come_at_once() {
    model(|| {
        let world = World::new();
        let other = world.clone();
        let thread = thread::spawn(move || other.come(1));
        let first = world.come(0);
        let second = thread.join().unwrap();
        world.settle([first, second]);
    });
}

#[test]
fn two_come_as_one_leaves() {
    model(|| {
        let (world, permit) = World::with_one_running();
        let other = world.clone();
        let thread = thread::spawn(move || other.come(1));
        let last = world.clone();
        let leaver = thread::spawn(move || last.leave(permit));
        let first = world.come(0);
        let second = thread.join().unwrap();
        leaver.join().unwrap();
        world.settle([first, second]);
    });
}

/// A head that gives up while it is being claimed: the claim is passed on, and no count is lost.
#[test]
fn one_gives_up_as_another_leaves() {
    model(|| {
        let (world, permit, ticket) = World::with_one_waiting();
        let other = world.clone();
        let thread = thread::spawn(move || other.leave(permit));
        if world.gate.replace_head(0, ticket, None) {
            world.gate.stop_waiting();
            world.pass_on();
            thread.join().unwrap();
        } else {
            thread.join().unwrap();
            assert_eq!(
                world.told[0].load(Ordering::Relaxed),
                1,
                "claimed, not told"
            );
            world.gate.show(0, None);
            world.leave(world.gate.take());
        }
        assert_eq!(world.gate.counts(), (0, 0));
    });
}

/// Who counted one for a head that has given up looks once more: another has come meanwhile and found no room.
#[test]
fn one_comes_as_a_claim_fails() {
    model_up_to(3, || {
        let (world, permit, ticket) = World::with_one_waiting();
        let last = world.clone();
        let leaver = thread::spawn(move || last.leave(permit));
        let other = world.clone();
        let comer = thread::spawn(move || other.come(1));
        let gave_up = world.gate.replace_head(0, ticket, None);
        if gave_up {
            world.gate.stop_waiting();
        }
        leaver.join().unwrap();
        let waits = comer.join().unwrap();
        if gave_up {
            assert!(
                !waits || world.told[1].load(Ordering::Relaxed) == 1,
                "it waits in an empty room"
            );
        }
    });
}
