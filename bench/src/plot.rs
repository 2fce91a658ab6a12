//! Plots of measured series, as SVG.

use std::path::Path;

use plotters::prelude::*;

/// A line of a plot.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, ordered by the first coordinate.
    pub points: Vec<(f64, f64)>,
}

/// A bar of a plot.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Its name below the axis.
    pub name: String,
    /// What it consists of, from below.
    pub parts: Vec<f64>,
    /// Where its error bar ends, if it has one; it begins at the top of the bar.
    pub error_end: Option<f64>,
}

/// The labels of a plot.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a> {
    /// The title.
    pub title: &'a str,
    /// The horizontal axis.
    pub x: &'a str,
    /// The vertical axis.
    pub y: &'a str,
}

/// A plot that could not be drawn or written.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PlotError {
    /// There are no points.
    #[error("there is nothing to plot")]
    Empty,
    /// The file could not be written.
    #[error("cannot write the plot {path}: {reason}")]
    Write {
        /// The path of the file.
        path: String,
        /// The reason.
        reason: String,
    },
}

const SIZE: (u32, u32) = (800, 480);
const STROKE: u32 = 2;
const POINT: i32 = 3;
const CROSS: i32 = 5;
const COLORS: [RGBColor; 6] = [
    RGBColor(0, 90, 181),
    RGBColor(220, 50, 32),
    RGBColor(26, 133, 60),
    RGBColor(148, 91, 201),
    RGBColor(200, 125, 0),
    RGBColor(70, 70, 70),
];

/// Draws lines with their points into an SVG file; the vertical axis begins at 0.
///
/// # Errors
/// [`PlotError`]; no file or an incomplete one is left.
pub fn lines(path: &Path, labels: Labels<'_>, series: &[Series]) -> Result<(), PlotError> {
    lines_and_marks(path, labels, series, &[])
}

/// Draws lines as [`lines`] does, and marks: points that no line connects, such as published ones.
///
/// # Errors
/// [`PlotError`]; no file or an incomplete one is left.
pub fn lines_and_marks(
    path: &Path,
    labels: Labels<'_>,
    series: &[Series],
    marks: &[Series],
) -> Result<(), PlotError> {
    let points = || series.iter().chain(marks).flat_map(|series| &series.points);
    let largest = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(f64::NAN, f64::max);
    let (right, top) = (largest(|point| point.0), largest(|point| point.1));
    let left = points().map(|point| point.0).fold(f64::NAN, f64::min);
    if !(left.is_finite() && right.is_finite() && top.is_finite()) {
        return Err(PlotError::Empty);
    }
    let right = if right > left { right } else { left + 1.0 };
    let top = if top > 0.0 { top * 1.1 } else { 1.0 };
    // The legend is where the lines are low.
    let middle = f64::midpoint(left, right);
    let highest = |is_there: &dyn Fn(f64) -> bool| {
        points().filter(|point| is_there(point.0)).map(|point| point.1).fold(0.0, f64::max)
    };
    let falls = highest(&|x| x < middle) > highest(&|x| x >= middle);
    let legend =
        if falls { SeriesLabelPosition::UpperRight } else { SeriesLabelPosition::UpperLeft };
    let drawn = draw(path, labels, (series, marks), (left..right, 0.0..top), legend);
    drawn.map_err(|error| PlotError::Write {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

fn draw(
    path: &Path,
    labels: Labels<'_>,
    (series, marks): (&[Series], &[Series]),
    (x, y): (std::ops::Range<f64>, std::ops::Range<f64>),
    legend: SeriesLabelPosition,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(labels.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    chart.configure_mesh().x_desc(labels.x).y_desc(labels.y).light_line_style(WHITE).draw()?;
    for (series, color) in series.iter().zip(COLORS.iter().cycle()) {
        let style = ShapeStyle::from(color).stroke_width(STROKE);
        chart
            .draw_series(LineSeries::new(series.points.iter().copied(), style))?
            .label(&series.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        let dots = series.points.iter().map(|point| Circle::new(*point, POINT, color.filled()));
        chart.draw_series(dots)?;
    }
    let colors = COLORS.iter().cycle().skip(series.len());
    for (marks, color) in marks.iter().zip(colors) {
        let style = ShapeStyle::from(color).stroke_width(STROKE);
        let crosses = marks.points.iter().map(|point| Cross::new(*point, CROSS, style));
        chart
            .draw_series(crosses)?
            .label(&marks.name)
            .legend(move |(x, y)| Cross::new((x + 9, y), CROSS, style));
    }
    chart
        .configure_series_labels()
        .position(legend)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}

/// The width of a bar with its space and its name.
const BAR_SPACE: u32 = 150;
const BAR_MARGIN: u32 = 30;
/// Half of the width of an error bar's end.
const CAP: i32 = 6;

/// Draws bars of parts that lie on each other into an SVG file; a legend names the parts if there are several.
///
/// # Errors
/// [`PlotError`]; no file or an incomplete one is left.
pub fn bars(
    path: &Path,
    labels: Labels<'_>,
    parts: &[&str],
    bars: &[Bar],
) -> Result<(), PlotError> {
    let ends =
        bars.iter().map(|bar| bar.parts.iter().sum::<f64>().max(bar.error_end.unwrap_or(0.0)));
    let top = ends.fold(f64::NAN, f64::max);
    let count = i32::try_from(bars.len()).unwrap_or(i32::MAX);
    if !top.is_finite() || count == 0 {
        return Err(PlotError::Empty);
    }
    let top = if top > 0.0 { top * 1.25 } else { 1.0 };
    // The end of a segmented axis belongs to it.
    draw_bars(path, labels, parts, bars, 0..count - 1, top).map_err(|error| PlotError::Write {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

fn draw_bars(
    path: &Path,
    labels: Labels<'_>,
    parts: &[&str],
    bars: &[Bar],
    places: std::ops::Range<i32>,
    top: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    let width = SIZE.0.max(u32::try_from(bars.len())?.saturating_mul(BAR_SPACE));
    let root = SVGBackend::new(path, (width, SIZE.1)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(labels.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(places.into_segmented(), 0.0..top)?;
    let name = |place: &SegmentValue<i32>| match place {
        SegmentValue::CenterOf(place) => {
            let bar = usize::try_from(*place).ok().and_then(|place| bars.get(place));
            bar.map_or_else(String::new, |bar| bar.name.clone())
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(bars.len())
        .x_label_formatter(&name)
        .x_desc(labels.x)
        .y_desc(labels.y)
        .light_line_style(WHITE)
        .draw()?;
    for (at, (part, color)) in parts.iter().zip(COLORS.iter().cycle()).enumerate() {
        let rectangles = (0..).zip(bars).map(|(place, bar)| {
            let bottom: f64 = bar.parts.iter().take(at).sum();
            let top = bottom + bar.parts.get(at).copied().unwrap_or(0.0);
            let corners =
                [(SegmentValue::Exact(place), bottom), (SegmentValue::Exact(place + 1), top)];
            let mut rectangle = Rectangle::new(corners, color.filled());
            rectangle.set_margin(0, 0, BAR_MARGIN, BAR_MARGIN);
            rectangle
        });
        let drawn = chart.draw_series(rectangles)?;
        if parts.len() > 1 {
            drawn.label(*part).legend(move |(x, y)| {
                Rectangle::new([(x, y - 5), (x + 18, y + 5)], color.filled())
            });
        }
    }
    let style = ShapeStyle::from(&BLACK).stroke_width(1);
    for (place, bar) in (0..).zip(bars) {
        let Some(end) = bar.error_end else { continue };
        let place = SegmentValue::CenterOf(place);
        let ends = [bar.parts.iter().sum(), end];
        let line = PathElement::new(ends.map(|end| (place.clone(), end)), style);
        chart.draw_series([line])?;
        let caps = ends.map(|end| {
            EmptyElement::at((place.clone(), end)) + PathElement::new([(-CAP, 0), (CAP, 0)], style)
        });
        chart.draw_series(caps)?;
    }
    if parts.len() > 1 {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Scratch;

    use super::*;

    const LABELS: Labels<'_> = Labels { title: "a title", x: "clients", y: "time (us)" };

    #[test]
    fn a_plot_names_its_axes_and_its_lines() {
        let scratch = Scratch::new("plot");
        let path = scratch.file("plot.svg");
        let series = ["ours", "theirs"]
            .map(|name| Series { name: name.to_owned(), points: vec![(1.0, 10.0), (2.0, 12.5)] });
        lines(&path, LABELS, &series).expect("it can be drawn");
        let text = std::fs::read_to_string(&path).expect("it was written");
        for word in ["a title", "clients", "time (us)", "ours", "theirs", "</svg>"] {
            assert!(text.contains(word), "{word} is missing");
        }
    }

    #[test]
    fn a_plot_with_marks_names_them_and_has_room_for_them() {
        let scratch = Scratch::new("plot-marks");
        let path = scratch.file("plot.svg");
        let series = |name: &str, points: &[(f64, f64)]| Series {
            name: name.to_owned(),
            points: points.to_owned(),
        };
        let ours = [series("ours", &[(25.0, 3.0), (100.0, 1.0)])];
        let published = [series("published", &[(50.0, 7.0)])];
        lines_and_marks(&path, LABELS, &ours, &published).expect("it can be drawn");
        let text = std::fs::read_to_string(&path).expect("it was written");
        for word in ["ours", "published", "7.0"] {
            assert!(text.contains(word), "{word} is missing");
        }
    }

    #[test]
    fn a_plot_names_its_bars_and_their_parts() {
        let scratch = Scratch::new("plot-bars");
        let path = scratch.file("plot.svg");
        let bar = |name: &str, parts: [f64; 2], error_end| Bar {
            name: name.to_owned(),
            parts: parts.into(),
            error_end,
        };
        let drawn = [bar("near", [1.0, 2.0], None), bar("far", [0.0, 5.0], Some(9.0))];
        bars(&path, LABELS, &["upper", "lower"], &drawn).expect("it can be drawn");
        let text = std::fs::read_to_string(&path).expect("it was written");
        for word in ["a title", "clients", "near", "far", "upper", "lower", "</svg>"] {
            assert!(text.contains(word), "{word} is missing");
        }
        bars(&path, LABELS, &["upper", "lower"], &drawn[..1]).expect("one bar can be drawn");
        let text = std::fs::read_to_string(&path).expect("it was written");
        assert!(text.contains("near") && !text.contains("far"), "{text}");
        assert!(matches!(bars(&path, LABELS, &["upper"], &[]), Err(PlotError::Empty)));
    }

    #[test]
    fn nothing_is_refused() {
        let refused = lines(Path::new("/nonexistent/plot.svg"), LABELS, &[]);
        assert!(matches!(refused, Err(PlotError::Empty)));
        let series = [Series { name: "one".to_owned(), points: vec![(0.0, 0.0)] }];
        let refused = lines(Path::new("/nonexistent/plot.svg"), LABELS, &series);
        assert!(matches!(refused, Err(PlotError::Write { .. })));
    }
}
