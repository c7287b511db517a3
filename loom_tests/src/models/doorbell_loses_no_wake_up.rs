//! D1: an owner that goes to sleep although something was sent is rung, by exactly one sender.

use loom::thread;
use shards::{Doorbell, Receiver, Sender, mailbox};
use std::sync::Arc;

use super::model;

/// The owner's way to sleep. True: it sleeps.
fn go_to_sleep(bell: &Doorbell, mailboxes: &[&Receiver<u8>]) -> bool {
    bell.announce_sleep();
    let is_empty = mailboxes.iter().all(|mailbox| mailbox.is_empty());
    if !is_empty {
        bell.announce_awake();
    }
    is_empty
}

fn send(mut sender: Sender<u8>, bell: Arc<Doorbell>) -> thread::JoinHandle<(bool, Sender<u8>)> {
    thread::spawn(move || {
        sender.try_send(7).unwrap();
        (bell.ring(), sender)
    })
}

#[test]
fn one_sender() {
    model(|| {
        let (sender, receiver) = mailbox(1);
        let bell = Arc::new(Doorbell::new());
        let thread = send(sender, Arc::clone(&bell));
        let sleeps = go_to_sleep(&bell, &[&receiver]);
        let (is_rung, _sender) = thread.join().unwrap();
        assert!(!sleeps || is_rung, "asleep with mail, and nobody rings");
    });
}

#[test]
fn two_senders_ring_once() {
    model(|| {
        let (sender_a, receiver_a) = mailbox(1);
        let (sender_b, receiver_b) = mailbox(1);
        let bell = Arc::new(Doorbell::new());
        let threads = [
            send(sender_a, Arc::clone(&bell)),
            send(sender_b, Arc::clone(&bell)),
        ];
        let sleeps = go_to_sleep(&bell, &[&receiver_a, &receiver_b]);
        let rings = threads
            .map(|thread| thread.join().unwrap())
            .map(|(is_rung, _)| is_rung);
        let ring_count = rings.iter().filter(|is_rung| **is_rung).count();
        assert!(ring_count <= 1, "one sleep, two wake-ups");
        assert!(
            !sleeps || ring_count == 1,
            "asleep with mail, and nobody rings"
        );
    });
}

/// The second sleep is rung as reliably as the first.
#[test]
fn a_second_sleep() {
    model(|| {
        let (sender, mut receiver) = mailbox(1);
        let bell = Arc::new(Doorbell::new());
        let thread = send(sender, Arc::clone(&bell));
        let first = go_to_sleep(&bell, &[&receiver]);
        bell.announce_awake();
        let received = receiver.try_recv().is_some();
        let second = go_to_sleep(&bell, &[&receiver]);
        let (is_rung, _sender) = thread.join().unwrap();
        assert!(
            received || !second || is_rung,
            "asleep with mail, and nobody rings ({first})"
        );
    });
}
