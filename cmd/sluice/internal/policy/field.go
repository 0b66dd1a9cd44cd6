// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/kit/nearest"
)

func explainFieldCommand(inv *invocation.Invocation) *cobra.Command {
	var recursive bool
	cmd := &cobra.Command{
		Use:   "explain-field [KIND[.PATH]]",
		Short: "Show whether a field of a kind of policy is enforced, converted or refused",
		Long: `Show whether Sluice supports a field of a kind of policy, and what the field does; for an
object, also show the fields in it. PATH has a name for each level, such as
cnp.spec.ingress.toPorts; positions in lists, as in spec.ingress[0], are ignored.
Without KIND, the command lists the kinds. It needs no running service: it executes
` + program + ` from its own directory or from PATH.

  enforced   the field decides which packets pass, as its kind defines
  converted  not supported: the policy is accepted with a note, and its rule allows less,
             or denies more, than the manifest says
  refused    a policy with the field is refused
  no effect  accepted; no verdict depends on the field`,
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return policykind.Names(), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			if len(a) == 0 {
				if recursive {
					return invocation.Usagef("--recursive needs a kind, such as %s", policykind.Names()[0])
				}
				return explainKinds(cmd.Context(), inv)
			}
			return explainField(cmd.Context(), inv, a[0], recursive)
		},
	}
	cmd.Flags().BoolVar(&recursive, "recursive", false, "list the fields of all levels, not only the next one")
	return cmd
}

// field is one line of the output of `sluice-policy fields`, and one field in `policy explain-field -o json`.
type field struct {
	Kind     string   `json:"kind"`
	Versions []string `json:"versions"`
	Path     string   `json:"path"`
	Type     string   `json:"type"`
	Required bool     `json:"required"`
	Support  string   `json:"support"`
	Becomes  string   `json:"becomes,omitempty"`
	Setting  string   `json:"setting,omitempty"`
	Values   []string `json:"values,omitempty"`
	About    string   `json:"about"`
}

// fields returns all fields of all kinds from the policy service's program.
func fields(ctx context.Context) ([]field, error) {
	program, err := findProgram()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, "fields")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s fields: %w: %s", program, err, strings.TrimSpace(errOut.String()))
	}
	var all []field
	for decoder := json.NewDecoder(&out); ; {
		var one field
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s fields: %w", program, err)
		}
		all = append(all, one)
	}
}

// kindFields is one kind in `policy explain-field -o json`.
type kindFields struct {
	Kind     string         `json:"kind"`
	Versions []string       `json:"versions"`
	Fields   map[string]int `json:"fields"` // how many, by support
}

// supports are the values of field.Support.
var supports = []string{"enforced", "converted", "refused", "no effect"}

func explainKinds(ctx context.Context, inv *invocation.Invocation) error {
	all, err := fields(ctx)
	if err != nil {
		return err
	}
	var kinds []kindFields
	for _, f := range all {
		if n := len(kinds); n == 0 || kinds[n-1].Kind != f.Kind {
			kinds = append(kinds, kindFields{Kind: f.Kind, Versions: f.Versions, Fields: map[string]int{}})
		}
		kinds[len(kinds)-1].Fields[f.Support]++
	}
	return inv.Show(kinds, func(w io.Writer) {
		output.Row(w, "KIND", "VERSIONS", "ENFORCED", "CONVERTED", "REFUSED", "NO EFFECT")
		for _, k := range kinds {
			cells := []any{k.Kind, strings.Join(k.Versions, ",")}
			for _, s := range supports {
				cells = append(cells, k.Fields[s])
			}
			output.Row(w, cells...)
		}
	})
}

// position matches a position in a list: [0].
var position = regexp.MustCompile(`\[[0-9*]*\]`)

func explainField(ctx context.Context, inv *invocation.Invocation, text string, recursive bool) error {
	name, path, _ := strings.Cut(text, ".")
	kind, err := policykind.Named(name)
	if err != nil {
		return err
	}
	path = strings.Trim(position.ReplaceAllString(path, ""), ".")
	all, err := fields(ctx)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(f field) bool { return f.Kind != kind.Name })
	if len(all) == 0 {
		return fmt.Errorf("%s does not know %s; it may have another version", program, kind.Name)
	}
	path = withContent(all, path)
	shown, found := []field{}, path == ""
	for _, f := range all {
		switch rest, below := strings.CutPrefix(f.Path, path+"."); {
		case path == "":
			if recursive || !strings.Contains(f.Path, ".") {
				shown = append(shown, f)
			}
		case f.Path == path:
			found = true
			shown = append(shown, f)
		case below && (recursive || !strings.Contains(rest, ".")):
			shown = append(shown, f)
		}
	}
	if !found {
		return invocation.Usagef("%s has no field %s: such a policy is refused%s", kind.Name, path, near(all, path))
	}
	return inv.Show(shown, func(w io.Writer) { writeFields(w, kind.Name, path, shown) })
}

// withContent returns the path of the containing field if the author of a policy chooses the end of the path, such as a
// label in matchLabels.
func withContent(all []field, path string) string {
	for _, f := range all {
		if strings.HasPrefix(path, f.Path+".") && (f.Type == "map of strings" || strings.HasSuffix(f.Type, "any")) {
			return f.Path
		}
	}
	return path
}

// near lists the fields of the closest existing object for an unknown path, and suggests the nearest one.
func near(all []field, path string) string {
	for unknown := path; path != ""; {
		at := strings.LastIndexByte(path, '.')
		path = path[:max(at, 0)]
		var names []string
		for _, f := range all {
			rest := f.Path
			if path != "" {
				after, below := strings.CutPrefix(f.Path, path+".")
				if !below {
					continue
				}
				rest = after
			}
			if !strings.Contains(rest, ".") {
				names = append(names, rest)
			}
		}
		if len(names) > 0 {
			missing, _, _ := strings.Cut(strings.TrimPrefix(unknown, path+"."), ".")
			if path != "" {
				path = " in " + path
			}
			return "; there are" + path + ": " + strings.Join(names, ", ") + nearest.Hint(missing, names)
		}
	}
	return ""
}

func writeFields(w io.Writer, kind, path string, shown []field) {
	fmt.Fprintf(w, "Kind:\t%s (%s)\n", kind, strings.Join(shown[0].Versions, ", "))
	children := shown
	if path != "" {
		f := shown[0]
		children = shown[1:]
		fmt.Fprintf(w, "Field:\t%s\nType:\t%s\nRequired:\t%t\nSupport:\t%s\nAbout:\t%s\n",
			f.Path, f.Type, f.Required, f.supportText(), f.About)
		if len(f.Values) > 0 {
			fmt.Fprintf(w, "Values:\t%s\n", strings.Join(f.Values, ", "))
		}
	}
	if len(children) == 0 {
		return
	}
	fmt.Fprintln(w)
	output.Row(w, "FIELD", "TYPE", "SUPPORT", "ABOUT")
	for _, f := range children {
		name := strings.TrimPrefix(strings.TrimPrefix(f.Path, path), ".")
		if f.Required {
			name += "*"
		}
		output.Row(w, name, f.Type, f.Support, f.About)
	}
}

// supportText returns the support of a field with its conditions.
func (f field) supportText() string {
	text := f.Support
	if f.Becomes != "" {
		text += ", " + f.Becomes
	}
	if f.Setting != "" {
		text += "; refused without the setting " + f.Setting + " of " + program
	}
	return text
}
