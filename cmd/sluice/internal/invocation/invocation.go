// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package invocation is one run of the program: the flags that all commands share, the services' sockets, and what
// is printed and returned at its end. It knows no command.
package invocation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/version"
)

// Run executes the program with some commands, and returns its exit code.
func Run(args []string, stdout, stderr io.Writer, commands ...func(*Invocation) *cobra.Command) int {
	return RunRoot(args, stdout, stderr, func(c *Invocation) *cobra.Command { return c.Root(commands...) })
}

// RunRoot executes the program with another root.
func RunRoot(args []string, stdout, stderr io.Writer, rootOf func(*Invocation) *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return RunContext(ctx, args, stdout, stderr, rootOf)
}

// RunContext executes the program with another root until a context ends, as a part of a command that does more.
func RunContext(ctx context.Context, args []string, stdout, stderr io.Writer,
	rootOf func(*Invocation) *cobra.Command,
) int {
	c := &Invocation{Out: stdout, ErrOut: stderr}
	root := rootOf(c)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	var mistake error
	root.SetHelpFunc(helpOrMistake(root.HelpFunc(), &mistake))
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = mistake
	}
	if err != nil && wantsJSON(args) {
		c.Format = "json" // also if a mistake kept the flag from being read
	}
	var exit *ExitError
	var usage *UsageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		if exit.Err != nil {
			c.complain(exit.Err)
		}
		return exit.Code
	case errors.As(err, &usage):
		c.complain(err)
		return ExitUsage
	default:
		c.complain(err)
		return ExitFailed
	}
}

// Invocation is what all subcommands share.
type Invocation struct {
	Out, ErrOut io.Writer

	Instance string
	RunDir   string // overrides the instance's
	Format   string // "table" or "json"
	Timeout  time.Duration
	// AnswerLimit bounds the bytes of all messages of one answer that a service streams; 0: no bound.
	AnswerLimit int
}

// Root is the command that has all others.
func (c *Invocation) Root(commands ...func(*Invocation) *cobra.Command) *cobra.Command {
	root := c.Bare("sluice")
	root.Short = "Show and run a Sluice node"
	root.Long = `Show what the services of a Sluice node know and do, apply and explain network
policies, and run a whole node for development. Every answer comes from a service's socket, which root and members
of group 65700 may open. The group may read; what changes something, check and map dump are for root alone.`
	flags := root.PersistentFlags()
	flags.StringVar(&c.Instance, "instance", os.Getenv("SLUICE_INSTANCE"),
		"name of the copy of Sluice to talk to (or SLUICE_INSTANCE); empty for the machine's own")
	flags.StringVar(&c.RunDir, "run-dir", "", "directory of the sockets, if it is not the instance's")
	for _, command := range commands {
		root.AddCommand(command(c))
	}
	return root
}

// Bare is a root without commands, and with the flags that do not say which sockets are asked.
func (c *Invocation) Bare(use string) *cobra.Command {
	root := &cobra.Command{
		Use:           use,
		Args:          cobra.ArbitraryArgs,
		RunE:          onlyGroups,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.Get().String(),
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if c.Format != "table" && c.Format != "json" {
				return Usagef("--output: %q is neither table nor json", c.Format)
			}
			if c.Timeout <= 0 {
				return Usagef("--timeout: %s is not positive", c.Timeout)
			}
			return nil
		},
	}
	flags := root.PersistentFlags()
	flags.StringVarP(&c.Format, "output", "o", "table", "table or json")
	flags.DurationVar(&c.Timeout, "timeout", 10*time.Second, "how long one answer may take")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	return root
}

// VersionCommand is `version`.
func VersionCommand(c *Invocation) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the version of this program", Args: Args(0, ""),
		RunE: func(*cobra.Command, []string) error {
			v := version.Get().String()
			return c.Show(map[string]string{"version": v}, func(w io.Writer) { fmt.Fprintln(w, v) })
		},
	}
}

// helpOrMistake prints the help of a command, or says that there is none of a name: the library prints the help of the
// root for whatever was typed.
func helpOrMistake(help func(*cobra.Command, []string), mistake *error) func(*cobra.Command, []string) {
	return func(cmd *cobra.Command, args []string) {
		if cmd.HasSubCommands() {
			if rest := cmd.Flags().Args(); len(rest) > 0 && cmd.Name() != "help" {
				*mistake = onlyGroups(cmd, rest)
				return
			}
		}
		help(cmd, args)
	}
}

// Group is a command that only has subcommands.
func Group(use, short string, subcommands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: onlyGroups}
	cmd.AddCommand(subcommands...)
	return cmd
}

// onlyGroups runs when none of a command's subcommands was named.
func onlyGroups(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return Usagef("%s has no command %q; see `%s --help`", cmd.CommandPath(), args[0], cmd.CommandPath())
	}
	return cmd.Help()
}

// Args checks the number of arguments.
func Args(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == n {
			return nil
		}
		if n == 0 {
			return Usagef("%s takes no argument, got %q", cmd.CommandPath(), args)
		}
		return Usagef("%s wants %s", cmd.CommandPath(), what)
	}
}

// Socket is the path of a service's socket.
func (c *Invocation) Socket(service string) (string, error) {
	paths, err := instance.New(c.Instance)
	if err != nil {
		return "", Usagef("--instance: %w", err)
	}
	if c.RunDir != "" {
		if paths.RunDir, err = filepath.Abs(c.RunDir); err != nil {
			return "", Usagef("--run-dir: %w", err)
		}
	}
	return paths.Socket(service), nil
}

// Dial connects to a service. A call fails at once if nobody answers: a person
// waits for it.
func (c *Invocation) Dial(service string) (*grpc.ClientConn, error) {
	path, err := c.Socket(service)
	if err != nil {
		return nil, err
	}
	o := client.Options{Timeout: c.Timeout}
	if c.AnswerLimit > 0 {
		o.Dial = []grpc.DialOption{grpc.WithChainStreamInterceptor(limitAnswers(c.AnswerLimit))}
	}
	return client.Dial(path, o)
}

// Show prints v as JSON, or what table writes. A slice is a list: JSON has one object with its elements as "items".
func (c *Invocation) Show(v any, table func(w io.Writer)) error {
	if c.Format == "json" {
		e := json.NewEncoder(c.Out)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		if list := reflect.ValueOf(v); list.Kind() == reflect.Slice {
			if list.IsNil() {
				v = []struct{}{}
			}
			v = map[string]any{"items": v}
		}
		return e.Encode(v)
	}
	w := tabwriter.NewWriter(c.Out, 0, 4, 2, ' ', 0)
	table(w)
	return w.Flush()
}

// ShowChanges prints what was changed, also if it ended with err, which it
// returns then.
func (c *Invocation) ShowChanges(changes []string, err error) error {
	shown := c.Show(map[string][]string{"changes": changes}, func(w io.Writer) {
		for _, change := range changes {
			fmt.Fprintln(w, change)
		}
	})
	if err != nil {
		return err
	}
	return shown
}

// ValidateFlag adds --validate-only, which --dry-run is another name of.
func ValidateFlag(cmd *cobra.Command, to *bool, help string) {
	cmd.Flags().BoolVar(to, "validate-only", false, help+"; --dry-run is the same")
	cmd.Flags().SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "dry-run" {
			name = "validate-only"
		}
		return pflag.NormalizedName(name)
	})
}
