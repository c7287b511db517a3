//! M1, M2: values arrive in order, none lost, none twice, none torn; a full ring gives the value back.

use loom::thread;
use shards::mailbox;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::model;

#[test]
fn values_arrive_in_order() {
    model(|| {
        let (mut sender, mut receiver) = mailbox::<Box<u32>>(2);
        let thread = thread::spawn(move || {
            let sent: Vec<u32> = (0..4)
                .filter(|&value| sender.try_send(Box::new(value)).is_ok())
                .collect();
            assert_eq!(sender.dropped_count() as usize, 4 - sent.len());
            assert!(sent.len() >= 2, "there is room for two");
            (sent, sender)
        });
        let mut received: Vec<u32> = Vec::new();
        for _ in 0..2 {
            received.extend(receiver.try_recv().map(|value| *value));
        }
        let (sent, _sender) = thread.join().unwrap();
        while let Some(value) = receiver.try_recv() {
            received.push(*value);
        }
        assert_eq!(received, sent);
        assert!(receiver.is_empty());
    });
}

/// A full ring gives the very value back.
#[test]
fn a_full_ring_refuses() {
    model(|| {
        let (mut sender, mut receiver) = mailbox(1);
        sender.try_send(1).unwrap();
        let thread = thread::spawn(move || {
            let result = sender.try_send(2);
            (result, sender)
        });
        assert_eq!(receiver.try_recv(), Some(1));
        let (result, _sender) = thread.join().unwrap();
        match result {
            Ok(()) => assert_eq!(receiver.try_recv(), Some(2)),
            Err(value) => assert!(value == 2 && receiver.is_empty()),
        }
    });
}

/// What was not received is dropped with the ring, by whichever end goes last.
#[test]
fn what_is_left_is_dropped_once() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    model(|| {
        let dropped_count = Arc::new(AtomicUsize::new(0));
        let (mut sender, mut receiver) = mailbox(2);
        let theirs = Arc::clone(&dropped_count);
        let thread = thread::spawn(move || {
            let _ = sender.try_send(Counted(Arc::clone(&theirs)));
            let _ = sender.try_send(Counted(theirs));
        });
        drop(receiver.try_recv());
        drop(receiver);
        thread.join().unwrap();
        assert_eq!(dropped_count.load(Ordering::Relaxed), 2);
    });
}
