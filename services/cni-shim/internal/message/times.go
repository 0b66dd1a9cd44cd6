// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"math"
	"time"
)

// Time converts m.
func (m *Timestamp) Time() time.Time { return time.Unix(m.Seconds, int64(m.Nanos)) }

// Duration converts m, clipped to the range of time.Duration.
func (m *Duration) Duration() time.Duration {
	const most = math.MaxInt64 / int64(time.Second)
	switch {
	case m.Seconds >= most:
		return math.MaxInt64
	case m.Seconds <= -most:
		return math.MinInt64
	}
	return time.Duration(m.Seconds)*time.Second + time.Duration(m.Nanos)
}
