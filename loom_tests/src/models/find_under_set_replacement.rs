//! T1, H1: a look-up while a holder set changes its form sees the old set or the new one, and no freed memory.

use super::forest::{ONE_SEGMENT, insert, look_twice_during};

#[test]
fn word_to_list_to_longer_list() {
    // Bitmaps of slots above 128 are larger than short lists.
    look_twice_during(
        &[10, 20, 190],
        ONE_SEGMENT,
        |shard| {
            insert(shard, 15, &[1]);
            insert(shard, 25, &[1]);
        },
        |seen| {
            matches!(
                seen,
                [10, 20, 190] | [10, 15, 20, 190] | [10, 15, 20, 25, 190]
            )
        },
        5,
    );
}

#[test]
fn bits_set_in_place_and_a_longer_bitmap() {
    // Thirteen slots below 64: a bitmap of one word is smaller than the list.
    look_twice_during(
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        2 * ONE_SEGMENT,
        |shard| {
            insert(shard, 20, &[1]);
            insert(shard, 150, &[1]);
        },
        |seen| match seen {
            [0, .., 12] => seen.len() == 13,
            [0, .., 12, 20] => seen.len() == 14,
            [0, .., 12, 20, 150] => seen.len() == 15,
            _ => false,
        },
        15,
    );
}
