// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
)

// ExitOnStdinEOF is the flag by which a command ends with its caller. One that kubectl executes in a pod is not told
// that its caller has ended: its input ends.
const ExitOnStdinEOF = "exit-on-stdin-eof"

// UntilInputEnds is the former name of ExitOnStdinEOF. Until 0.2.0 the plugin of kubectl gives this one: it may be
// newer than the program in the pod.
const UntilInputEnds = "until-input-ends"

// ExitOnStdinEOFFlag adds the flag to a command, which calls EndWith then.
func ExitOnStdinEOFFlag(cmd *cobra.Command, to *bool) {
	cmd.Flags().BoolVar(to, ExitOnStdinEOF, false, "end when standard input does, for a caller on another machine")
	formerFlag(cmd, UntilInputEnds, ExitOnStdinEOF)
}

// abandoned is how long after the end of its input a command may still write.
const abandoned = 2 * time.Second

// EndWith ends the context when the input ends. The program ends soon after that, unless stop is called before: the
// pipe of a command that kubectl executes in a pod stays open without a reader when kubectl is killed, and a write into
// it would wait forever.
func EndWith(ctx context.Context, input io.Reader) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, input)
		cancel()
		select {
		case <-stopped:
		case <-time.After(abandoned):
			os.Exit(ExitFailed)
		}
	}()
	return ctx, func() {
		cancel()
		close(stopped)
	}
}
