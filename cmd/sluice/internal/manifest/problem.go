// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"errors"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
)

// documentField matches the field of a validation error: the index of a document, from 0, and a field of that document.
var documentField = regexp.MustCompile(`^(?:manifests|documents?)\[(\d+)\]\.?(.*)$`)

// InDocuments replaces the positions of documents in a service's validation errors by files and lines.
func InDocuments(err error, docs []Document) error {
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.InvalidArgument {
		return err
	}
	var lines []string
	for _, detail := range st.Details() {
		bad, ok := detail.(*errdetails.BadRequest)
		if !ok {
			continue
		}
		for _, v := range bad.GetFieldViolations() {
			match := documentField.FindStringSubmatch(v.GetField())
			if match == nil {
				lines = append(lines, strings.TrimPrefix(v.GetField()+": "+v.GetDescription(), ": "))
				continue
			}
			text := v.GetDescription()
			if match[2] != "" && !strings.HasPrefix(text, match[2]+": ") {
				text = match[2] + ": " + text
			}
			n, err := strconv.Atoi(match[1])
			switch {
			case err != nil:
				lines = append(lines, v.GetField()+": "+text)
				continue
			case n >= len(docs):
				lines = append(lines, "document "+strconv.Itoa(n+1)+": "+text)
				continue
			}
			lines = append(lines, docs[n].Problem(text))
		}
	}
	if len(lines) == 0 {
		return err
	}
	return errors.New(strings.Join(lines, "\n"))
}

// Problem returns a message with the place and the name of the document.
func (d Document) Problem(text string) string {
	name := policykind.KeyText(d.Key)
	if name != "" {
		name += ": "
	}
	return output.Printable(d.Place() + ": " + name + text)
}
