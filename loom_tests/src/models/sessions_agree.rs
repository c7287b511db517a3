//! N1 to N3: two cores that meet a new session at a time bind it to one worker, and the numbers of sessions are right.

use loom::sync::Arc;
use loom::thread;
use shards::{Now, Sessions, Slot};

use super::model;

const NOW: Now = Now {
    secs: 1,
    ttl_secs: 10,
};
const KEY: u64 = 7 << 50;

#[test]
fn two_cores_bind_one_session() {
    model(|| {
        let sessions = Arc::new(Sessions::new(1));
        let theirs = Arc::clone(&sessions);
        let thread = thread::spawn(move || theirs.bind(KEY, Slot(1), None, NOW));
        let ours = sessions.bind(KEY, Slot(2), None, NOW);
        let theirs = thread.join().unwrap();
        assert_eq!(ours, theirs, "one session, two workers");
        assert_eq!(sessions.find(KEY, NOW), Some(ours));
        assert_eq!((sessions.total(), sessions.count(ours)), (1, 1));
    });
}

/// A word before theirs becomes free meanwhile: the two may part, but then agree, and one word is left.
#[test]
fn two_cores_bind_one_session_while_a_word_becomes_free() {
    const OTHER: u64 = 9 << 50;
    model(|| {
        let sessions = Arc::new(Sessions::new(1));
        sessions.bind(OTHER, Slot(3), None, NOW);
        let theirs = Arc::clone(&sessions);
        let thread = thread::spawn(move || {
            theirs.end(OTHER);
            theirs.bind(KEY, Slot(1), None, NOW)
        });
        let ours = sessions.bind(KEY, Slot(2), None, NOW);
        let theirs = thread.join().unwrap();
        let found = sessions.find(KEY, NOW).expect("it is bound");
        assert!(found == ours || found == theirs);
        assert_eq!((sessions.total(), sessions.count(found)), (1, 1));
        assert!(sessions.end(KEY));
        assert_eq!(sessions.total(), 0, "a second word was left");
    });
}
