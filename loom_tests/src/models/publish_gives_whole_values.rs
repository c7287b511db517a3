//! P1, P2: a load gives a whole value that is not freed under its pin; a version seen is not ahead of its value.

use loom::cell::UnsafeCell;
use loom::thread;
use shards::{Domain, Pin, Published, published};
use std::sync::Arc;

use super::model;

/// A value written by the publisher and "freed" by a write that loom holds against every read. The cell outlives the
/// value, so a late read is reported.
struct Snapshot(&'static UnsafeCell<u64>);

impl Snapshot {
    fn new(number: u64) -> Self {
        Self(Box::leak(Box::new(UnsafeCell::new(number))))
    }

    fn number(&self) -> u64 {
        // SAFETY: the cell is leaked; loom judges the access.
        self.0.with(|number| unsafe { *number })
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        // SAFETY: as above.
        self.0.with_mut(|number| unsafe { *number = 0 });
    }
}

// SAFETY: loom judges every access to the cell.
unsafe impl Sync for Snapshot {}
// SAFETY: as above.
unsafe impl Send for Snapshot {}

fn read(published: &Published<Snapshot>, pin: &Pin<'_>) -> u64 {
    let number = published.load(pin).number();
    assert_ne!(number, 0, "used after it was freed");
    number
}

#[test]
fn one_reader() {
    model(|| {
        let domain = Arc::new(Domain::new(1));
        let mut reader = domain.reader(0);
        let (mut publisher, published) = published(domain, Snapshot::new(1));
        let theirs = Arc::clone(&published);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            let version = theirs.version();
            let first = read(&theirs, &pin);
            assert!(first >= version, "the version is ahead of its value");
            let second = read(&theirs, &pin);
            assert!(second >= first, "back to an older value");
            drop(pin);
            reader
        });
        publisher.publish(Snapshot::new(2));
        publisher.publish(Snapshot::new(3));
        assert_eq!(publisher.current().number(), 3);
        let _reader = thread.join().unwrap();
        publisher.reclaim();
    });
}

#[test]
fn two_readers() {
    model(|| {
        let domain = Arc::new(Domain::new(2));
        let readers = [domain.reader(0), domain.reader(1)];
        let (mut publisher, published) = published(domain, Snapshot::new(1));
        let threads = readers.map(|mut reader| {
            let theirs = Arc::clone(&published);
            thread::spawn(move || {
                let pin = reader.pin();
                read(&theirs, &pin);
                drop(pin);
                reader
            })
        });
        publisher.publish(Snapshot::new(2));
        let _readers = threads.map(|thread| thread.join().unwrap());
        publisher.reclaim();
    });
}
