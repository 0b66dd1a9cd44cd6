// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Size is the value of a flag in bytes, such as 512, 64KiB, 64K, 10MiB, 10M, 1GiB or 1G.
type Size int64

var units = []struct {
	names  []string
	factor int64
}{
	{[]string{"GiB", "G"}, 1 << 30},
	{[]string{"MiB", "M"}, 1 << 20},
	{[]string{"KiB", "K"}, 1 << 10},
	{[]string{"B"}, 1},
}

// String implements pflag.Value.
func (s Size) String() string {
	for _, u := range units {
		if s != 0 && int64(s)%u.factor == 0 {
			return strconv.FormatInt(int64(s)/u.factor, 10) + u.names[0]
		}
	}
	return "0"
}

// Set implements pflag.Value.
func (s *Size) Set(text string) error {
	digits, factor := text, int64(1)
	for _, u := range units {
		for _, name := range u.names {
			if rest, ok := strings.CutSuffix(text, name); ok && factor == 1 && digits == text {
				digits, factor = rest, u.factor
			}
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/factor {
		return fmt.Errorf("want a size such as 512KiB, 64MiB or 1GiB, got %q", text)
	}
	*s = Size(n * factor)
	return nil
}

// Type implements pflag.Value.
func (*Size) Type() string { return "size" }
