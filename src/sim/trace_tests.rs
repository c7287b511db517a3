//! Each format by a few rows, and rows that are wrong.

use super::*;

fn shares(a: &Turn, b: &Turn) -> usize {
    let (a, b) = (a.content.blocks(1, 0), b.content.blocks(1, 0));
    a.iter().zip(&b).take_while(|(a, b)| a == b).count()
}

fn turn(workload: &Workload, session: usize, turn: usize) -> &Turn {
    &workload.sessions[session].turns[turn]
}

#[test]
fn mooncake_rows_share_the_blocks_of_equal_ids() {
    let text = "{\"timestamp\": 2000, \"input_length\": 1300, \"output_length\": 9, \"hash_ids\": [0, 7, 8]}\n\
                {\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 5, \"hash_ids\": [0, 7]}\n\n\
                {\"timestamp\": 2500, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [0, 9]}\n";
    let workload = mooncake(text).unwrap();
    let starts: Vec<Ns> = workload
        .sessions
        .iter()
        .map(|session| session.start)
        .collect();
    assert_eq!(starts, [0, ns(2.0), ns(2.5)]);
    let (first, second, third) = (
        turn(&workload, 0, 0),
        turn(&workload, 1, 0),
        turn(&workload, 2, 0),
    );
    assert_eq!((second.content.tokens(), second.output_tokens), (1300, 9));
    assert_eq!((shares(first, second), shares(second, third)), (1024, 512));
    assert!(
        mooncake("{\"timestamp\": 1}")
            .unwrap_err()
            .starts_with("line 1: ")
    );
}

#[test]
fn azure_rows_share_nothing() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:18:04.0319600,3180,8\n";
    let workload = azure(text).unwrap();
    let (first, second) = (turn(&workload, 0, 0), turn(&workload, 1, 0));
    assert_eq!(
        (first.content.tokens(), second.content.tokens()),
        (4808, 3180)
    );
    assert_eq!((shares(first, second), second.output_tokens), (0, 8));
    let gap = workload.sessions[1].start as f64 / 1e9;
    assert!((gap - 60.052).abs() < 1e-6, "{gap}");
    let wrong = azure("h\n2023-11-16 18:17:03,x,1\n").unwrap_err();
    assert!(wrong.starts_with("line 2: "), "{wrong}");
}

#[test]
fn agents_turns_share_what_their_texts_share() {
    let row = |at: u64, input: &str, session: &str| {
        format!(
            "{{\"timestamp\": {at}, \"input\": \"{input}\", \"output\": \"01234567\", \"session_id\": \"{session}\"}}\n"
        )
    };
    let text = [
        row(3_000_000, "aaaabbbbccccdddd", "one"),
        row(1_000_000, "aaaabbbb", "one"),
        row(1_000_000, "aaaabbbb", "two"),
    ];
    let workload = agent(&text.concat()).unwrap();
    let (first, second) = (turn(&workload, 0, 0), turn(&workload, 0, 1));
    assert_eq!((second.pause, second.output_tokens), (ns(2.0), 2));
    assert_eq!((shares(first, second), second.content.tokens()), (2, 4));
    assert_eq!(shares(first, turn(&workload, 1, 0)), 0);
}

#[test]
fn tracelab_rounds_share_their_prefix() {
    let text = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n\
                0,117,0,0,2318,200,300\n0,117,1,2518,348,131,154\n0,117,2,1000,812,104,0\n";
    let workload = tracelab(text).unwrap();
    let session = &workload.sessions[0];
    assert_eq!((session.start, session.turns[1].pause), (0, ns(0.3)));
    assert_eq!(session.turns[1].content.tokens(), 2866);
    assert_eq!(shares(&session.turns[0], &session.turns[1]), 2318);
    assert_eq!(shares(&session.turns[1], &session.turns[2]), 1000);
    assert!(tracelab("0,x,0,0,1,1,1").unwrap_err().contains("column 2"));
}
