//! The generator's threads, pinned, all at the same slice.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::generator::{Generator, Plan, Slice};
use super::tally::Tally;

struct Hand {
    slices: Option<Sender<Slice>>,
    tallies: Receiver<io::Result<Tally>>,
    thread: Option<JoinHandle<()>>,
}

/// Threads that wait for their next slice. Dropping it ends them.
pub struct Crew {
    hands: Vec<Hand>,
}

impl Crew {
    /// One thread for each of `cpus` (numbers as in `/proc/cpuinfo`); `None`: not pinned.
    ///
    /// # Errors
    /// A thread or its ring cannot be made.
    pub fn start(plan: &Plan, cpus: &[Option<usize>]) -> io::Result<Crew> {
        let of = cpus.len();
        let hand = |(at, cpu): (usize, &Option<usize>)| {
            let plan = Plan {
                part: (at, of),
                ..plan.clone()
            };
            let cpu = *cpu;
            let (slices, wanted) = channel::<Slice>();
            let (done, tallies) = channel();
            let thread = std::thread::Builder::new()
                .name(format!("bench-{at}"))
                .spawn(move || {
                    if let Some(id) = cpu {
                        core_affinity::set_for_current(core_affinity::CoreId { id });
                    }
                    let mut generator = match Generator::new(plan) {
                        Ok(generator) => generator,
                        Err(e) => return drop(done.send(Err(e))),
                    };
                    while let Ok(slice) = wanted.recv() {
                        if done.send(generator.run(slice)).is_err() {
                            return;
                        }
                    }
                })?;
            Ok(Hand {
                slices: Some(slices),
                tallies,
                thread: Some(thread),
            })
        };
        let hands = cpus
            .iter()
            .enumerate()
            .map(hand)
            .collect::<io::Result<_>>()?;
        Ok(Crew { hands })
    }

    /// All threads run the slice; what they counted together.
    ///
    /// # Errors
    /// One of them could not go on.
    pub fn run(&self, slice: Slice) -> io::Result<Tally> {
        let gone = || io::Error::other("a thread of the generator has ended");
        for hand in &self.hands {
            // One that has ended has said why.
            let _ = hand.slices.as_ref().map(|slices| slices.send(slice));
        }
        let mut all = Tally::default();
        for hand in &self.hands {
            all.add(&hand.tallies.recv().map_err(|_| gone())??, true);
        }
        Ok(all)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for hand in &mut self.hands {
            hand.slices.take();
            if let Some(thread) = hand.thread.take() {
                // A panic over there has been reported by its thread already.
                let _ = thread.join();
            }
        }
    }
}
