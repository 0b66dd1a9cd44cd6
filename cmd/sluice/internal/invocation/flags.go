// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"errors"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/kit/nearest"
)

// wanted describes the expected values of the flag types whose parsers return errors of Go's standard library.
var wanted = map[string]string{
	"uint": "a whole number from 0 on", "int": "a whole number", "float": "a number", "bool": "true or false",
	"duration": "a duration with a unit, such as 10s or 5m",
}

// flagError turns an error of the flag parser into a usage error that names the flag and the expected value.
func flagError(cmd *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		return Usagef("%w%s", err, nearestFlag(cmd, unknown.GetSpecifiedName()))
	}
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return &UsageError{err}
	}
	kind := strings.TrimRight(strings.TrimSuffix(bad.GetFlag().Value.Type(), "Slice"), "0123456789")
	want := wanted[kind]
	switch number, parsed := errors.AsType[*strconv.NumError](bad.Unwrap()); {
	case want == "":
		return &UsageError{err}
	case parsed && errors.Is(number.Err, strconv.ErrRange):
		return Usagef("--%s: %q is out of range", bad.GetFlag().Name, bad.GetValue())
	case parsed || kind == "duration":
		return Usagef("--%s: %q is not %s", bad.GetFlag().Name, bad.GetValue(), want)
	}
	return &UsageError{err}
}

// nearestFlag returns the hint for an unknown flag of a command.
func nearestFlag(cmd *cobra.Command, name string) string {
	if len(name) < 2 { // a shorthand
		return ""
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, "--"+f.Name)
		}
	})
	return nearest.Hint("--"+name, names)
}
