// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ByteSize is a number of bytes, written with an optional unit: B, KiB, MiB,
// GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000).
type ByteSize int64

var byteUnits = []struct {
	name string
	size int64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"kB", 1e3},
	{"B", 1},
}

// UnmarshalText accepts "64MiB", "64 MiB" and "1048576".
func (b *ByteSize) UnmarshalText(text []byte) error {
	number, unit := strings.TrimSpace(string(text)), int64(1)
	for _, u := range byteUnits {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.size
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 {
		return fmt.Errorf("want a whole number with B, KiB, MiB, GiB, TiB, kB, MB, GB or TB")
	}
	if n > math.MaxInt64/unit {
		return fmt.Errorf("too large")
	}
	*b = ByteSize(n * unit)
	return nil
}

// MarshalText is the inverse of UnmarshalText, with the largest unit that divides.
func (b ByteSize) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

func (b ByteSize) String() string {
	if b != 0 {
		for _, u := range byteUnits[:4] {
			if int64(b)%u.size == 0 {
				return strconv.FormatInt(int64(b)/u.size, 10) + u.name
			}
		}
	}
	return strconv.FormatInt(int64(b), 10) + "B"
}
