//! A client and workers that say anything, in any pieces: both sides get the same however the bytes were cut.
//!
//! Input: a byte of settings and one that says which pieces; then, parted by bytes 0xFE, the client's bytes and those of
//! one worker after the other.

use crate::wire::{Answer, Played, Script, play};

pub fn relay(data: &[u8]) {
    let Some((settings, said)) = data.split_at_checked(2) else {
        return;
    };
    let mut parts = said.split(|byte| *byte == 0xfe);
    let client = parts.next().unwrap_or_default();
    let script = Script {
        client,
        replies: parts.collect(),
        ends_early: settings[0] & 1 != 0,
        resets: settings[0] & 2 != 0,
        reuses: settings[0] & 4 != 0,
        is_tight: settings[0] & 8 != 0,
    };
    let whole = play(&script, |_| usize::MAX);
    let mut state = u32::from(settings[1]) | 0x100;
    let pieces = play(&script, |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as usize >> (settings[1] & 7)
    });
    compare(&whole, &pieces, "in pieces");
    if said.len() < 400 {
        let side = settings[0] & 16 != 0;
        let ones = play(
            &script,
            |is_client| if is_client == side { 1 } else { usize::MAX },
        );
        compare(&whole, &ones, "one side byte by byte");
    }
}

fn compare(one: &Played, other: &Played, how: &str) {
    let (asked, a, b) = (one.asked, &one.answers, &other.answers);
    assert_eq!(one.seen, other.seen, "{how}: what workers got");
    for (n, (a, b)) in a.iter().zip(b).take(asked).enumerate() {
        if is_refusal(a) && is_refusal(b) {
            continue; // Of more than one fault, that which is seen first is told.
        }
        assert_eq!(a.is_whole, b.is_whole, "{how}: answer {n}: {a:?} {b:?}");
        assert_eq!(
            (&a.line, &a.fields),
            (&b.line, &b.fields),
            "{how}: answer {n}"
        );
        assert!(!a.is_whole || a.body == b.body, "{how}: answer {n}'s body");
    }
    // What follows the last sound request may be refused at once, or be waited for until its client ends.
    assert_eq!(
        a.len().min(asked),
        b.len().min(asked),
        "{how}: how many answers"
    );
    if a.len() <= asked && b.len() <= asked {
        assert_eq!(one.closed, other.closed, "{how}: how it ended");
    }
}

/// An answer of ours to what could not be read, or was too much.
fn is_refusal(answer: &Answer) -> bool {
    let is_ours = answer.leg.is_none() && answer.line.get(9) == Some(&b'4');
    is_ours
        && answer
            .fields
            .iter()
            .any(|(name, value)| name == b"connection" && value == b"close")
}
