//! A page of metrics, as OpenMetrics or in Prometheus' older text format 0.0.4.

use std::fmt;
use std::time::Duration;

use flannel_core::status::Histogram;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

/// The format of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus' text format, version 0.0.4, the default.
    Text,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The format that a client accepts, by its header `Accept`.
    pub(crate) fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Text }
    }

    /// The `Content-Type`.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Text => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The metrics of a page, in its order.
#[derive(Default)]
pub(super) struct Page(Vec<Metric>);

/// The samples of one name.
struct Metric {
    name: &'static str,
    help: String,
    kind: MetricType,
    encode: Box<dyn Fn(MetricEncoder<'_>) -> fmt::Result + Send + Sync>,
}

pub(super) type Labels = Vec<(&'static str, String)>;

pub(super) fn labels(labels: &[(&'static str, &str)]) -> Labels {
    labels.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

impl Page {
    /// Adds a metric. Its name is the one that queries use, `_total` and `_info` included.
    fn add(
        &mut self,
        name: &'static str,
        help: &str,
        kind: MetricType,
        encode: impl Fn(MetricEncoder<'_>) -> fmt::Result + Send + Sync + 'static,
    ) {
        // The encoder adds these itself where the format wants them.
        let suffix = match kind {
            MetricType::Counter => "_total",
            MetricType::Info => "_info",
            _ => "",
        };
        let name = name.strip_suffix(suffix).unwrap_or(name);
        self.0.push(Metric { name, help: format!("{help}."), kind, encode: Box::new(encode) });
    }

    /// Adds a gauge with the value 1 and informative labels.
    pub(super) fn info(&mut self, name: &'static str, help: &str, labels: Labels) {
        self.add(name, help, MetricType::Info, move |mut to| to.encode_info(&labels));
    }

    pub(super) fn seconds(&mut self, name: &'static str, help: &str, value: f64) {
        self.add(name, help, MetricType::Gauge, move |mut to| to.encode_gauge(&value));
    }

    pub(super) fn gauges(
        &mut self,
        name: &'static str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        let samples: Vec<_> = samples.into_iter().collect();
        self.add(name, help, MetricType::Gauge, move |mut to| {
            let mut samples = samples.iter();
            samples.try_for_each(|(labels, value)| to.encode_family(labels)?.encode_gauge(value))
        });
    }

    pub(super) fn gauge(&mut self, name: &'static str, help: &str, value: u64) {
        self.gauges(name, help, [(Labels::new(), value)]);
    }

    /// Adds a gauge that is 1 or 0.
    pub(super) fn flag(&mut self, name: &'static str, help: &str, value: bool) {
        self.gauge(name, help, value.into());
    }

    pub(super) fn counters(
        &mut self,
        name: &'static str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        let samples: Vec<_> = samples.into_iter().collect();
        self.add(name, help, MetricType::Counter, move |mut to| {
            samples.iter().try_for_each(|(labels, value)| {
                to.encode_family(labels)?.encode_counter::<Labels, _, u64>(value, None)
            })
        });
    }

    pub(super) fn counter(&mut self, name: &'static str, help: &str, value: u64) {
        self.counters(name, help, [(Labels::new(), value)]);
    }

    pub(super) fn histogram(&mut self, name: &'static str, help: &str, histogram: &Histogram) {
        let seconds = |bound| match bound {
            Duration::MAX => f64::INFINITY,
            bound => bound.as_secs_f64(),
        };
        let buckets: Vec<_> =
            histogram.buckets().map(|(bound, count)| (seconds(bound), count)).collect();
        let sum = histogram.sum().as_secs_f64();
        let count = histogram.count();
        self.add(name, help, MetricType::Histogram, move |mut to| {
            to.encode_histogram::<Labels>(sum, count, &buckets, None)
        });
    }

    pub(super) fn encoded(self, format: Format) -> String {
        let mut registry = Registry::default();
        let mut text = String::new();
        registry.register_collector(Box::new(self));
        let written = match format {
            Format::Text => prometheus_text::encode(&mut text, &registry),
            Format::OpenMetrics => text::encode(&mut text, &registry),
        };
        // Encoding fails only if the writer fails, and a string does not.
        written.unwrap_or_else(|error| unreachable!("{error}"));
        text
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|metric| metric.name)).finish()
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|Metric { name, help, kind, encode }| {
            encode(encoder.encode_descriptor(name, help, None, *kind)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store names its requests, so a label may hold any text.
    #[test]
    fn labels_are_escaped() {
        let mut page = Page::default();
        page.gauges("a", "b \\ c", [(labels(&[("x", "a\"b\\c\nd")]), 1)]);
        let text = page.encoded(Format::Text);
        let expected = "# HELP a b \\\\ c.\n# TYPE a gauge\na{x=\"a\\\"b\\\\c\\nd\"} 1\n";
        assert_eq!(text, expected);
    }
}
