//! Events as an enumeration whose every variant has a name in reports.

/// Declares `Event` with its documentation, `Event::ALL`, and `Event::name`.
macro_rules! events {
    ($about:literal; $($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        #[doc = $about]
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[repr(u8)]
        pub enum Event { $($(#[$doc])* $variant,)* }

        impl Event {
            /// Every event.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name in reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

pub(crate) use events;
