//! A bounded ring between two cores: the sender's end belongs to one, the receiver's to the other. A full ring gives the
//! value back; waiting is nobody's business here, waking is the doorbell's.
//!
//! Invariants:
//! - M1 values arrive in order, none lost, none twice; what is in the ring when both ends are gone is dropped;
//! - M2 a cell is touched by one side at a time: by the sender while it is outside `head..tail`, by the receiver inside.

use std::mem::MaybeUninit;

use crate::sync::{AtomicUsize, CachePadded, CountedArc, Ordering, UnsafeCell};

/// Positions count up for ever (wrapping); a position's cell is its low bits.
struct Ring<T> {
    /// Next position to receive. Written by the receiver.
    head: CachePadded<AtomicUsize>,
    /// Next position to send. Written by the sender.
    tail: CachePadded<AtomicUsize>,
    /// A power of two of them, `capacity` or more.
    cells: Box<[UnsafeCell<MaybeUninit<T>>]>,
    capacity: usize,
}

// SAFETY: the two ends share the ring, and M2 gives every cell to one of them at a time; values cross threads, so `T: Send`.
unsafe impl<T: Send> Sync for Ring<T> {}
// SAFETY: it owns its values; as above.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T> Ring<T> {
    fn cell(&self, position: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.cells[position & (self.cells.len() - 1)]
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // ORDERING: Relaxed twice; both ends are gone, the Arc brought their stores here.
        let mut head = self.head.load(Ordering::Relaxed);
        let tail = self.tail.load(Ordering::Relaxed);
        while head != tail {
            self.cell(head).with_mut(|value| {
                // SAFETY: cells of head..tail hold values that nobody received (M1), and nobody else is left.
                unsafe { (*value).assume_init_drop() }
            });
            head = head.wrapping_add(1);
        }
    }
}

/// The sending end. `Send`.
pub struct Sender<T> {
    ring: CountedArc<Ring<T>>,
    tail: usize,
    /// The receiver's position as last seen; looked at again only when the ring seems full.
    head_seen: usize,
    dropped_count: u64,
}

/// The receiving end. `Send`.
pub struct Receiver<T> {
    ring: CountedArc<Ring<T>>,
    head: usize,
    /// The sender's position as last seen; looked at again only when the ring seems empty.
    tail_seen: usize,
}

/// Both ends of a ring that holds `capacity` values.
///
/// # Panics
/// If `capacity` is 0.
pub fn mailbox<T: Send>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    assert!(capacity > 0, "a mailbox holds at least one value");
    let cells = (0..capacity.next_power_of_two()).map(|_| UnsafeCell::new(MaybeUninit::uninit()));
    let ring = CountedArc::new(Ring {
        head: CachePadded::new(AtomicUsize::new(0)),
        tail: CachePadded::new(AtomicUsize::new(0)),
        cells: cells.collect(),
        capacity,
    });
    let sender = Sender {
        ring: CountedArc::clone(&ring),
        tail: 0,
        head_seen: 0,
        dropped_count: 0,
    };
    (
        sender,
        Receiver {
            ring,
            head: 0,
            tail_seen: 0,
        },
    )
}

impl<T> Sender<T> {
    /// Sends without waiting. `Err(value)`: full; it is counted.
    pub fn try_send(&mut self, value: T) -> Result<(), T> {
        if self.is_full() {
            self.dropped_count += 1;
            return Err(value);
        }
        self.ring.cell(self.tail).with_mut(|cell| {
            // SAFETY: the position is outside head..tail, so the cell is ours (M2) and holds no value.
            unsafe { (*cell).write(value) };
        });
        self.tail = self.tail.wrapping_add(1);
        // ORDERING: Release pairs with the receiver's Acquire of tail: carries the value.
        self.ring.tail.store(self.tail, Ordering::Release);
        Ok(())
    }

    fn is_full(&mut self) -> bool {
        if self.tail.wrapping_sub(self.head_seen) < self.ring.capacity {
            return false;
        }
        // ORDERING: Acquire pairs with the receiver's Release of head: the value was moved out before we overwrite it.
        self.head_seen = self.ring.head.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head_seen) >= self.ring.capacity
    }

    /// How many sends found the ring full.
    #[must_use]
    pub fn dropped_count(&self) -> u64 {
        self.dropped_count
    }
}

impl<T> Receiver<T> {
    /// The oldest value, if there is one.
    pub fn try_recv(&mut self) -> Option<T> {
        if self.head == self.tail_seen {
            // ORDERING: Acquire pairs with the sender's Release of tail: the value is written before we read it.
            self.tail_seen = self.ring.tail.load(Ordering::Acquire);
            if self.head == self.tail_seen {
                return None;
            }
        }
        let value = self.ring.cell(self.head).with(|cell| {
            // SAFETY: the position is inside head..tail, so the cell is ours (M2) and holds a value, which we take once: head
            // moves past it below.
            unsafe { (*cell).assume_init_read() }
        });
        self.head = self.head.wrapping_add(1);
        // ORDERING: Release pairs with the sender's Acquire of head: the cell is free.
        self.ring.head.store(self.head, Ordering::Release);
        Some(value)
    }

    /// Whether nothing has arrived. The look that an owner takes between `announce_sleep` and sleeping.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        // ORDERING: Acquire as in try_recv; that a look after announce_sleep cannot miss a send is the doorbell's fences.
        self.head == self.tail_seen && self.head == self.ring.tail.load(Ordering::Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::testing::Random;
    use std::collections::VecDeque;
    use std::sync::Arc;

    /// Random sends and receives against a queue of the standard library, at capacities that are no power of two, too.
    #[test]
    fn equals_the_twin() {
        for (seed, capacity) in [(1, 1), (2, 2), (3, 3), (4, 7), (5, 8)] {
            let mut random = Random::new(seed);
            let (mut sender, mut receiver) = mailbox(capacity);
            let mut twin = VecDeque::new();
            let mut refused_count = 0;
            for value in 0..10_000 {
                if random.below(2) == 0 {
                    let is_full = twin.len() == capacity;
                    assert_eq!(
                        sender.try_send(value),
                        if is_full { Err(value) } else { Ok(()) }
                    );
                    if is_full {
                        refused_count += 1
                    } else {
                        twin.push_back(value)
                    }
                } else {
                    assert_eq!(receiver.try_recv(), twin.pop_front());
                }
                assert_eq!(receiver.is_empty(), twin.is_empty());
            }
            assert_eq!(sender.dropped_count(), refused_count);
        }
    }

    #[test]
    fn positions_may_wrap() {
        let (mut sender, mut receiver) = mailbox(3);
        let start = usize::MAX - 5;
        sender.ring.head.store(start, Ordering::Relaxed);
        sender.ring.tail.store(start, Ordering::Relaxed);
        (sender.tail, sender.head_seen) = (start, start);
        (receiver.head, receiver.tail_seen) = (start, start);
        for value in 0..20 {
            (0..3).for_each(|part| sender.try_send((value, part)).unwrap());
            assert!(sender.try_send((0, 0)).is_err());
            (0..3).for_each(|part| assert_eq!(receiver.try_recv(), Some((value, part))));
        }
    }

    #[test]
    fn what_is_left_is_dropped() {
        let value = Arc::new(());
        let (mut sender, mut receiver) = mailbox(4);
        (0..3).for_each(|_| sender.try_send(Arc::clone(&value)).unwrap());
        drop(receiver.try_recv());
        drop((receiver, sender));
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn threads_keep_the_order() {
        let (mut sender, mut receiver) = mailbox(60);
        const COUNT: u64 = 50_000;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for value in 0..COUNT {
                    let mut value = Box::new(value);
                    while let Err(back) = sender.try_send(value) {
                        value = back;
                        std::thread::yield_now();
                    }
                }
            });
            for expected in 0..COUNT {
                let value = loop {
                    match receiver.try_recv() {
                        Some(value) => break value,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(*value, expected);
            }
        });
        assert!(receiver.is_empty());
    }
}
