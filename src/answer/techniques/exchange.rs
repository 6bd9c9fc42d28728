//! What ranks exchange in a step, and how long a link would take for it.
//!
//! There is one rank here, so an exchange is counted and not carried out: its time is modelled, as if the link were
//! always busy at its full rate and nothing else ran meanwhile, and told apart from what is measured.

use crate::{
    base::Nanos,
    trace::{CollectiveKind, MarkKind, Op, Source, TraceError},
};

/// What a rank sends in one step of a workload: the last one.
pub(in crate::answer) fn bytes_per_step(source: &dyn Source) -> Result<u64, TraceError> {
    let (mut reader, mut chunk) = (source.open()?, Vec::new());
    let mut sent = 0.0;
    loop {
        let (events, _) = reader.lend(&mut chunk)?;
        if events.is_empty() {
            return Ok(sent as u64);
        }
        for event in events {
            match event.op {
                Op::Mark { kind: MarkKind::Step, .. } => sent = 0.0,
                Op::Collective { kind, bytes, ranks, .. } => sent += bytes as f64 * share_sent(kind, ranks),
                _ => {}
            }
        }
    }
}

/// How much of what a rank contributes it sends itself, in the ring algorithms that are the rule.
fn share_sent(kind: CollectiveKind, ranks: u16) -> f64 {
    let ranks = f64::from(ranks.max(1));
    match kind {
        CollectiveKind::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        // Everyone passes everyone else's part on.
        CollectiveKind::AllGather => ranks - 1.0,
        CollectiveKind::ReduceScatter => (ranks - 1.0) / ranks,
        CollectiveKind::Broadcast => 1.0,
    }
}

/// How long so many bytes take on a link.
pub(in crate::answer) fn time(bytes: u64, link_bytes_per_second: u64) -> Nanos {
    Nanos((bytes as f64 / link_bytes_per_second.max(1) as f64 * 1e9) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Recipe;

    #[test]
    fn data_parallel_ranks_send_their_gradients_almost_twice() {
        let parameters = 162_322_944.0; // of the reference model with its untied head
        let workload = Recipe::named("gpt-124m").unwrap().with("techniques", "ddp:8").workload().unwrap();
        let sent = bytes_per_step(&workload).unwrap() as f64;
        assert!((sent / (parameters * 4.0 * 2.0 * 7.0 / 8.0) - 1.0).abs() < 0.01, "{sent} bytes");
        assert_eq!(time(50_000_000_000, 50_000_000_000), Nanos(1_000_000_000));
    }

    #[test]
    fn sharded_optimizers_exchange_as_much_as_data_parallel_ranks_do() {
        let sent = |techniques: &str| {
            let workload = Recipe::named("gpt-124m").unwrap().with("techniques", techniques).workload().unwrap();
            bytes_per_step(&workload).unwrap() as f64
        };
        // A sum is a scatter and a gather. ZeRO 3 gathers weights once more, in the backward pass.
        let replicated = sent("ddp:8");
        assert!((sent("zero2:8") / replicated - 1.0).abs() < 0.02, "{} {replicated}", sent("zero2:8"));
        assert!((1.2..1.6).contains(&(sent("zero3:8") / replicated)), "{} {replicated}", sent("zero3:8"));
    }

    #[test]
    fn one_rank_sends_nothing() {
        let workload = Recipe::named("gpt-124m").unwrap().workload().unwrap();
        assert_eq!(bytes_per_step(&workload).unwrap(), 0);
        assert_eq!(share_sent(CollectiveKind::AllReduce, 1), 0.0);
    }
}
