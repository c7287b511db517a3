use super::*;
use crate::route::KeySeed;

/// Written by Python's msgpack 1.1 from what vLLM's publisher makes.
const ARRAYS: &str =
    "93cb3ff80000000000009198ab426c6f636b53746f726564920b0cc0940102030402c0a3475055c000";
/// The short form of older engines, a negative-looking hash, a parent, wide token ids; then a removal and a clearing.
const OLDER: &str = "92cb3ff80000000000009396ab426c6f636b53746f72656491cffffffffffffffffd0c92ce00011170cd012c02c093ac426c\
    6f636b52656d6f766564910ba343505591b0416c6c426c6f636b73436c6561726564";
/// Named fields, with all that newer engines say and one thing more.
const MAPS: &str = "93cb3ff8000000000000918da474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb170617265\
    6e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469\
    756da3475055a96c6f72615f6e616d65a26164aa65787472615f6b6579739292a26164a473616c74c0a967726f75705f69647800b26b765f\
    63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ebc6b765f63616368655f737065635f736c6964696e675f77696e\
    646f77c0a96e65775f7468696e6781a161910100";
/// The batch a map, too, the tag last; hashes as bytes.
const ALL_MAPS: &str = "83a27473cb3ff8000000000000a66576656e74739284ac626c6f636b5f68617368657391c4200101010101010101010101\
    010101010101010101010101010101010101010101a66d656469756dc0a967726f75705f69647801a474797065ac426c6f636b52656d6f\
    76656481a474797065b0416c6c426c6f636b73436c6561726564b2646174615f706172616c6c656c5f72616e6b03";

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pairs = digits
        .chunks_exact(2)
        .map(|pair| str::from_utf8(pair).unwrap());
    pairs
        .map(|pair| u8::from_str_radix(pair, 16).unwrap())
        .collect()
}

fn keys() -> BlockKeys {
    BlockKeys::new(KeySeed(1))
}

/// Events as text, and whether the batch was good.
fn decoded(payload: &[u8]) -> (Vec<String>, bool) {
    let mut shown = Vec::new();
    let mut decoder = Decoder::default();
    let result = decoder.decode(payload, &keys(), |event| shown.push(format!("{event:?}")));
    (shown, result.is_ok())
}

fn stored<'e>(names: &'e [u64], parent: Option<u64>, tokens: &'e [u32]) -> Stored<'e> {
    Stored {
        names,
        parent,
        tokens,
        block_tokens: 2,
        adapter: None,
        extras: &[],
        tier: DEVICE,
        group: None,
        is_whole: true,
    }
}

#[test]
fn recorded_bytes_are_understood() {
    let keys = keys();
    let show = |event: Event<'_>| format!("{event:?}");
    let removed = |names, tier, group| show(Event::Removed { names, tier, group });
    let table = [
        (
            ARRAYS,
            vec![show(Event::Stored(stored(&[11, 12], None, &[1, 2, 3, 4])))],
        ),
        (
            OLDER,
            vec![
                show(Event::Stored(stored(
                    &[u64::MAX - 2],
                    Some(12),
                    &[70_000, 300],
                ))),
                removed(&[11], HOST, None),
                show(Event::Cleared),
            ],
        ),
        (
            MAPS,
            vec![show(Event::Stored(Stored {
                adapter: Some("ad"),
                extras: &[keys.extra(b"salt"), 0],
                group: Some(0),
                ..stored(&[11, 12], None, &[1, 2, 3, 4])
            }))],
        ),
        (
            ALL_MAPS,
            vec![
                removed(&[xxh3_64(&[1; 32])], DEVICE, Some(1)),
                show(Event::Cleared),
            ],
        ),
    ];
    for (hex, wanted) in table {
        assert_eq!(decoded(&bytes(hex)), (wanted, true), "{hex}");
    }
}

#[test]
fn what_is_cut_off_or_changed_is_refused_and_never_a_panic() {
    for hex in [ARRAYS, OLDER, MAPS, ALL_MAPS] {
        let whole = bytes(hex);
        for end in 0..whole.len() {
            let (_, is_good) = decoded(&whole[..end]);
            // The rank at the end of an array is not looked at.
            assert!(!is_good || end + 1 == whole.len(), "{hex} {end}");
        }
        for at in 0..whole.len() {
            for byte in 0..=255 {
                let mut changed = whole.clone();
                changed[at] = byte;
                decoded(&changed);
            }
        }
    }
}

fn packed(value: rmpv::Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &value).unwrap();
    bytes
}

fn batch(events: Vec<rmpv::Value>) -> Vec<u8> {
    use rmpv::Value;
    packed(Value::Array(vec![Value::F64(1.0), Value::Array(events)]))
}

fn event(fields: &[(&str, rmpv::Value)]) -> rmpv::Value {
    let fields = fields
        .iter()
        .map(|(name, value)| ((*name).into(), value.clone()));
    rmpv::Value::Map(fields.collect())
}

#[test]
fn an_event_that_makes_no_sense_spares_its_neighbours() {
    use rmpv::Value;
    let list = |numbers: &[u64]| Value::Array(numbers.iter().map(|n| (*n).into()).collect());
    let good: Vec<(&str, Value)> = vec![
        ("type", "BlockStored".into()),
        ("block_hashes", list(&[1])),
        ("token_ids", list(&[5, 6])),
        ("block_size", 2.into()),
    ];
    let with = |name: &'static str, value: Value| {
        let mut fields = good.clone();
        fields.retain(|(other, _)| *other != name);
        fields.push((name, value));
        event(&fields)
    };
    let bad = [
        with("token_ids", list(&[5])),
        with("token_ids", list(&[5, 1 << 40])),
        with("token_ids", "56".into()),
        with("token_ids", Value::Nil),
        with("block_size", 0.into()),
        with("block_size", u64::MAX.into()),
        with("block_hashes", Value::Array(vec![Value::Boolean(true)])),
        with("parent_block_hash", Value::F32(1.0)),
        with("extra_keys", list(&[1])),
        with("extra_keys", Value::Array(vec![Value::Nil; 2])),
        with("type", Value::Nil),
        Value::Nil,
        "BlockStored".into(),
    ];
    for wrong in bad {
        let (shown, is_good) = decoded(&batch(vec![event(&good), wrong.clone(), event(&good)]));
        assert!(is_good, "{wrong}");
        assert_eq!(shown[1], "Bad", "{wrong}");
        assert_eq!(shown[0], shown[2]);
        assert!(shown[0].starts_with("Stored"), "{}", shown[0]);
    }
    // Kinds that are not known are no fault; a batch of too many events, or too deep a one, is.
    let (shown, is_good) = decoded(&batch(vec![with("type", "BlockMoved".into())]));
    assert_eq!((shown, is_good), (vec!["Other".to_owned()], true));
    let (_, is_good) = decoded(&batch(vec![Value::Nil; EVENT_COUNT_MAX + 1]));
    assert!(!is_good);
    let deep = (0..40).fold(Value::Nil, |inner, _| Value::Array(vec![inner]));
    let (_, is_good) = decoded(&batch(vec![deep]));
    assert!(!is_good);
}

#[test]
fn media_and_groups_are_told_apart() {
    use rmpv::Value;
    let table = [
        ("GPU", DEVICE),
        ("cpu", HOST),
        ("CPU", HOST),
        ("DISK", DISK),
        ("lmcache_remote", EXTERNAL),
    ];
    for (medium, wanted) in table {
        assert_eq!(tier(&packed(medium.into())), wanted, "{medium}");
    }
    assert_eq!(tier(&packed(Value::Nil)), DEVICE);
    assert_eq!(tier(&[]), DEVICE);
    let kinds = [
        ("full_attention", true),
        ("mla_attention", true),
        ("sliding_window", false),
        ("mamba", false),
    ];
    for (kind, wanted) in kinds {
        let raw = packed(kind.into());
        let raw = Raw {
            kind: &raw,
            ..Raw::default()
        };
        assert_eq!(is_whole(&raw), wanted, "{kind}");
    }
    let window = packed(4096.into());
    let raw = Raw {
        window: &window,
        ..Raw::default()
    };
    assert!(!is_whole(&raw));
}
