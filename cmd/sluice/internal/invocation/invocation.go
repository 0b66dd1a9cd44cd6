// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package invocation contains the parts that all commands share: the global flags, the connections to the services, the
// output, the errors and the exit code. It does not depend on any command.
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
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nearest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/version"
)

// Run executes the program with the given commands and returns its exit code.
func Run(args []string, stdout, stderr io.Writer, commands ...func(*Invocation) *cobra.Command) int {
	return RunRoot(args, stdout, stderr, func(c *Invocation) *cobra.Command { return c.Root(commands...) })
}

// RunRoot executes the program with the root command that rootOf returns.
func RunRoot(args []string, stdout, stderr io.Writer, rootOf func(*Invocation) *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return RunContext(ctx, args, stdout, stderr, rootOf)
}

// RunContext is RunRoot for a command that runs other commands. It stops when ctx ends.
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
	checkHelpTopics(root)
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = mistake
	}
	if err != nil && wantsJSON(args) {
		c.Format = "json" // the error may have occurred before the flag was parsed
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

// Invocation holds the output streams and the global flags.
type Invocation struct {
	Out, ErrOut io.Writer

	Instance string
	RunDir   string // overrides the run directory of the instance
	Format   string // "table", "wide" or "json"
	Timeout  time.Duration
	// AnswerLimit is the largest size of one streamed answer in bytes; 0: unlimited.
	AnswerLimit int
}

// Root returns the root command with its subcommands and global flags.
func (c *Invocation) Root(commands ...func(*Invocation) *cobra.Command) *cobra.Command {
	root := c.Bare("sluice")
	root.Short = "Inspect and operate a Sluice node"
	root.Long = `Show the state of a Sluice node, apply and explain network policies, and run whole nodes for
development. sluice asks the services of the node over their sockets, which root and members
of group 65700 may open. Members of the group may use commands that only show something;
check, map dump and commands that change something require root.`
	flags := root.PersistentFlags()
	flags.StringVar(&c.Instance, "instance", os.Getenv("SLUICE_INSTANCE"),
		"instance of Sluice on this machine (default: $SLUICE_INSTANCE, or the installed node)")
	flags.StringVar(&c.RunDir, "run-dir", "", "directory of the sockets (default: the instance's)")
	for _, command := range commands {
		root.AddCommand(command(c))
	}
	return root
}

// Bare returns a root command without subcommands, with the flags --output and --timeout only.
func (c *Invocation) Bare(use string) *cobra.Command {
	root := &cobra.Command{
		Use:           use,
		Args:          cobra.ArbitraryArgs,
		RunE:          onlyGroups,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.Get().String(),
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains(Formats, c.Format) {
				return NotOneOf("--output", c.Format, Formats)
			}
			if c.Timeout <= 0 {
				return Usagef("--timeout: %s is not positive", c.Timeout)
			}
			return nil
		},
	}
	flags := root.PersistentFlags()
	flags.StringVarP(&c.Format, "output", "o", "table",
		"table, wide (all columns, lines not wrapped) or json")
	flags.DurationVar(&c.Timeout, "timeout", 10*time.Second, "how long to wait for each answer")
	root.SetFlagErrorFunc(flagError)
	return root
}

// Formats are the values of --output.
var Formats = []string{"table", "wide", "json"}

// Wide reports whether --output is wide: tables then have more columns, and lines may be longer than output.Width.
func (c *Invocation) Wide() bool { return c.Format == "wide" }

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

// helpOrMistake prints the help of a command. For an unknown subcommand it sets mistake instead; cobra would print the
// help of the parent command.
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

// checkHelpTopics lets `help TOPIC` report an unknown topic; cobra would print the help of the parent command.
func checkHelpTopics(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() != "help" {
			continue
		}
		show := cmd.Run
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			topic, rest, err := root.Find(args)
			if err == nil && topic.HasSubCommands() && len(rest) > 0 {
				return onlyGroups(topic, rest)
			}
			show(cmd, args)
			return err
		}
	}
}

// Group returns a command that has only subcommands.
func Group(use, short string, subcommands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: onlyGroups}
	cmd.AddCommand(subcommands...)
	return cmd
}

// WithAlias adds a second name to a command.
func WithAlias(alias string, cmd *cobra.Command) *cobra.Command {
	cmd.Aliases = []string{alias}
	return cmd
}

// onlyGroups runs a command that has only subcommands: it prints help, or reports an unknown subcommand.
func onlyGroups(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		var names []string
		for _, sub := range cmd.Commands() {
			if !sub.Hidden {
				names = append(append(names, sub.Name()), sub.Aliases...)
			}
		}
		return Usagef("%s has no command %q; see `%s --help`%s", cmd.CommandPath(), args[0], cmd.CommandPath(),
			nearest.Hint(args[0], names))
	}
	return cmd.Help()
}

// NotOneOf returns the usage error for a word that is not among the valid words, with the nearest word. what is the
// flag; it may be empty.
func NotOneOf(what, text string, words []string) error {
	if what != "" {
		what += ": "
	}
	return Usagef("%s%q is not one of %s%s", what, text, strings.Join(words, ", "), nearest.Hint(text, words))
}

// Args requires exactly n arguments. what describes them in the error.
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

// Socket returns the path of a service's socket.
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

// Dial connects to a service. Calls fail at once if no process listens on the socket: a command does not wait for a
// service to start.
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

// Show prints v as JSON or, for the other formats, calls table. A slice becomes a JSON object with the elements as
// "items".
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
	w := output.Aligned(c.Out)
	table(w)
	return w.Flush()
}

// ShowChanges prints the changes that were made, even if err stopped them early. It returns err if that is set.
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

// ShowPlan prints the changes that a command would make without --dry-run, one per line.
func (c *Invocation) ShowPlan(changes []string) error {
	shown := struct {
		Changes      []string `json:"changes"`
		ValidateOnly bool     `json:"validateOnly"`
	}{append([]string{}, changes...), true}
	return c.Show(shown, func(w io.Writer) {
		if len(changes) == 0 {
			fmt.Fprintln(w, "Nothing was changed: --dry-run. There is nothing to change.")
			return
		}
		fmt.Fprintln(w, "Nothing was changed: --dry-run. The command would:")
		for _, change := range changes {
			fmt.Fprintln(w, "  "+output.Printable(change))
		}
	})
}

// ValidateFlag adds --dry-run. It is also accepted under its former name --validate-only.
func ValidateFlag(cmd *cobra.Command, to *bool, help string) {
	cmd.Flags().BoolVar(to, "dry-run", false, help)
	cmd.Flags().SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "validate-only" {
			name = "dry-run"
		}
		return pflag.NormalizedName(name)
	})
}
